"""What the commands call. It is imported after the arguments are parsed: importing torch takes
seconds, which help texts and usage errors need not wait for."""

# mypy: implicit-reexport
# ruff: noqa: F401

from fairvar.cli.doctor import examine
from fairvar.data import describe as describe_data
from fairvar.data import verify as verify_data
from fairvar.data.fetch import fetch
from fairvar.methods.catalogue import catalogue
from fairvar.methods.plugin import load_plugin
from fairvar.report import Estimate, to_rich
from fairvar.report.compare import paired_dict, paired_table, side, versus
from fairvar.report.files import write_report
from fairvar.report.result_figures import partition_figure
from fairvar.report.result_tables import shorten
from fairvar.report.style import require_matplotlib
from fairvar.report.style import save as save_figure
from fairvar.report.terminal import (
    agreement_table,
    claims_text,
    datasets_table,
    facts_table,
    methods_table,
    options_table,
    passport_table,
    run_table,
)
from fairvar.runs.batch import run_cell
from fairvar.runs.condense import condense
from fairvar.runs.config import Config
from fairvar.runs.identity import fingerprint, forget_files
from fairvar.runs.plan import Plan, differences, federations
from fairvar.runs.results import gather, stored_runs
from fairvar.runs.runner import Watch, class_counts, federation_of, missing, run_folder, start_note
from fairvar.runs.select import Criterion
from fairvar.runs.store import check_writable, is_complete, verify
from fairvar.runs.sweep import (
    crowding,
    parse_budget,
    parse_shard,
    project,
    run_on_ray,
    run_sweep,
    shard,
)
from fairvar.runs.verify import check_files, draw, rerun, seal_archive
from fairvar.system.progress import progress
from fairvar.system.signals import stop_signals
from fairvar.theory import claims
