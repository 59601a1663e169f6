"""What every process needs: exit codes, addresses, logs, metrics, service manager, kernel cache."""
