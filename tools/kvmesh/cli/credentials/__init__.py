"""The files of `kvmesh secure`: certificate authority, NATS configuration, files of each user."""
