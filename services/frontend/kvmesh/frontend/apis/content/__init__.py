"""Content of messages: typed objects of the wire, and what a prompt shows of foreign ones."""
