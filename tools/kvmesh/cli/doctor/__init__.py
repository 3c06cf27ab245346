"""Parts of `kvmesh doctor`: it gathers facts, and pure checks make findings of them."""
