"""Have the server do what `python ARGUMENTS...` would do here: client.py SOCKET ARGUMENTS...

Signals go on to the process that does it; its exit status becomes this one's.
"""

import json
import os
import signal
import socket
import sys

PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    address, *arguments = sys.argv[1:]
    files = [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
    job = {
        "arguments": arguments,
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "files": files,
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    }
    text = json.dumps(job).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [len(text).to_bytes(8, "little")], files)
        server.sendall(text)
        answers = server.makefile()
        pid = int(answers.readline())
        for number in PASSED_ON:
            signal.signal(number, lambda number, _: os.kill(pid, number))
        status = os.waitstatus_to_exitcode(int(answers.readline()))
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-status])
        os.kill(os.getpid(), -status)
    os._exit(status)


main()
