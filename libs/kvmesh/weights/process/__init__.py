"""The weights process of a worker: takes its weights from other workers, and offers them."""
