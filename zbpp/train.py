"""`zbpp train` for torchrun: torchrun --nproc-per-node 4 -m zbpp.train schedule=zb_h1 ...

Only the entry: zbpp/commands/train.py reads the arguments, zbpp/run/app.py trains.
"""

from zbpp.commands.train import main

if __name__ == "__main__":
    main()
