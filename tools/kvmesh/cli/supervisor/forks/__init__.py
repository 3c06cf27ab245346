"""Services of `kvmesh up` as forks of one process that has imported their code."""
