"""The state that pages show, kept up to date by messages. Pure: time is passed in."""
