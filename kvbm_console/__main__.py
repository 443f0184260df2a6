"""``python -m kvbm_console``: the program ``kvbm-console`` where its script is not on the path."""

from kvbm_console.cli.main import main

if __name__ == "__main__":  # whoever imports every module must not run it
    main()
