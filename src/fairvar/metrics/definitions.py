"""Every metric in one line: for footnotes, hover texts and the manual."""

from __future__ import annotations

DEFINITIONS = {
    "clients": "K: clients with at least one test sample and a finite accuracy",
    "dropped_clients": "clients left out because they have no test samples or no finite accuracy",
    "mean": "(1/K) Σ p_k: every client counts the same",
    "mean_over_samples": "Σ n_k p_k / Σ n_k: every test sample counts the same",
    "variance_over_clients": "Σ (p_k − mean)² / (K − ddof), in fraction²; ddof 1 by default",
    "noise_floor": "what finite test sets add to the variance: (1/K) Σ p_k(1 − p_k)/(n_k − 1)",
    "corrected_variance": "variance_over_clients − noise_floor: unbiased for the true accuracies",
    "variance_interval": "studentised bootstrap interval of variance_over_clients",
    "corrected_variance_interval": "studentised bootstrap interval of corrected_variance",
    "sd_over_clients": "square root of variance_over_clients",
    "coefficient_of_variation": "sd_over_clients / mean",
    "smallest": "min p_k: the worst-served client",
    "largest": "max p_k: the best-served client",
    "range_over_clients": "largest − smallest",
    "worst_10_percent": "mean of the ceil(K/10) lowest accuracies",
    "best_10_percent": "mean of the ceil(K/10) highest accuracies",
    "gini": "ΣΣ |p_j − p_k| / (2 K² mean): 0 if all are equal, at most 1 − 1/K",
    "jain": "(Σ p_k)² / (K Σ p_k²): 1 if all are equal, at least 1/K",
    "normalised_entropy": "−Σ s_k ln s_k / ln K with shares s_k = p_k / Σ p_j: 1 if all are equal",
    "kl_to_uniform": "Σ s_k ln(K s_k): 0 if all are equal, at most ln K",
    "cosine_to_ones": "cosine between (p_1 … p_K) and (1 … 1): 1 if all are equal",
    "loss_variance": "(1/n) Σ (f_i − F)²: what FairLoss regularises (it adds λ/2 of it)",
    "gradient_variance": "(1/n) Σ ‖∇f_i − ∇F‖²: what FairGrad regularises (it adds γ/2 of it)",
    "worse_than": "fraction of clients whose accuracy is lower than under the other model",
    "pareto_front": "the models that no other beats in accuracy and in variance together",
    "hypervolume": "area of the (accuracy, variance) pairs that some model beats, to a reference",
    "worst_class_of_client": "for each client the accuracy on its worst-served class",
    "epsilon_fair_order": "models with F ≤ min F + ε, by variance over clients, fairest first",
}
