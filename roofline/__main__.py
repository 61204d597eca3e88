"""``python -m roofline``: the command line without the installed script."""

from roofline.cli import main

if __name__ == "__main__":
    main()
