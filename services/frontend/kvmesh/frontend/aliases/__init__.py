"""Names under which clients reach several models."""
