"""Parks vLLM: its processes wait before they take their devices."""
