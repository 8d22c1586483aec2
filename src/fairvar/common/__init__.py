"""What every package uses: files, signals and progress, checks, trees of tensors, random streams,
notebook display. Internal; nothing here is exported."""
