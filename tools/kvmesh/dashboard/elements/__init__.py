"""Elements that pages are made of: frame, tables, charts, lanes, links."""
