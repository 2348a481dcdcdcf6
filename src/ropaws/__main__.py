"""python -m ropaws"""

from ropaws.cli import main

if __name__ == "__main__":
    main()
