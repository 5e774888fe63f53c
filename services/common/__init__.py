"""What two services need: domain types, errors, wire conversion, configuration, clocks, metrics."""
