"""Traces of requests over all processes; imports no OpenTelemetry unless it is turned on."""
