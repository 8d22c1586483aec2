"""Files, memory, signals and progress: what depends on the operating system."""
