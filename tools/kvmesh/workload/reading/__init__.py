"""The parts that the readers of all formats share: files, options, repairs, rows, assembly."""
