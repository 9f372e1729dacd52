"""What capstan.py asks of a framework, without one: a group is TCP connections to rank 0, and a state is JSON."""

import json
import os
import socket
import time


class Star:
    def __init__(self):
        self.listener, self.peers = None, []

    def open(self, rank, world, check):
        self.rank = rank
        at = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        if rank == 0:
            self.listener = socket.create_server(at)
            self.listener.settimeout(0.02)
            while len(self.peers) < world - 1:
                check()
                try:
                    self.peers.append(self.listener.accept()[0])
                except TimeoutError:
                    pass
            for peer in self.peers:
                peer.sendall(b"0\n")
        else:
            while not self.peers:
                check()
                try:
                    self.peers = [socket.create_connection(at, timeout=1)]
                except OSError:
                    time.sleep(0.02)
            self.peers[0].settimeout(None)
            self.read(self.peers[0])

    def read(self, peer):
        line = b""
        while not line.endswith(b"\n"):
            byte = peer.recv(1)
            if not byte:
                raise ConnectionError("a peer has closed its connection")
            line += byte
        return int(line)

    def maximum(self, value):
        def wait():
            if self.rank != 0:
                self.peers[0].sendall(b"%d\n" % value)
                return self.read(self.peers[0])
            highest = max([value] + [self.read(p) for p in self.peers])
            for p in self.peers:
                p.sendall(b"%d\n" % highest)
            return highest

        return wait

    def close(self):
        for s in self.peers + [self.listener] * (self.listener is not None):
            s.close()
        self.listener, self.peers = None, []

    def abort(self):
        pass

    def lost(self, error):
        return isinstance(error, ConnectionError)

    def dumps(self, state):
        return json.dumps(state).encode()

    def loads(self, data):
        return json.loads(bytes(data))

    def raw(self, x):
        return [repr(x).encode()]
