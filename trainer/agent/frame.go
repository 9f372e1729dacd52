package agent

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"

	"golang.org/x/sys/unix"

	"github.com/capstan-gpu/capstan/trainer/ring"
)

// hello is the first frame of either end.
type hello struct {
	Protocol int    `json:"protocol"`
	Job      string `json:"job"`
	Peer     Peer   `json:"peer"`
	Proof    string `json:"proof,omitempty"`
	Refused  string `json:"refused,omitempty"` // why there is nothing more to come
}

// envelope is every frame after it.
type envelope struct {
	Message ring.Message `json:"message"`
	Attached
}

// handshake does TLS's, and bounds all that follows by ctx's deadline until the bound is taken away.
func handshake(ctx context.Context, conn *tls.Conn) error {
	deadline, _ := ctx.Deadline()
	conn.SetDeadline(deadline)
	return conn.HandshakeContext(ctx)
}

// channel is a secret that only the two ends of the connection have.
func channel(conn *tls.Conn) ([]byte, error) {
	state := conn.ConnectionState()
	return state.ExportKeyingMaterial("EXPERIMENTAL capstan ring", nil, 32)
}

func frame(data []byte) []byte {
	return append(binary.BigEndian.AppendUint32(make([]byte, 0, 4+len(data)), uint32(len(data))), data...)
}

func writeFrame(w io.Writer, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = w.Write(frame(data))
	return err
}

// readFrame reads one frame of at most so many bytes into v.
func readFrame(r io.Reader, bound int, v any) error {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return err
	}
	n := binary.BigEndian.Uint32(head[:])
	if n > uint32(bound) {
		return fmt.Errorf("frame of %d bytes: want %d at most", n, bound)
	}
	data, err := io.ReadAll(io.LimitReader(r, int64(n))) // grows as it comes: a length alone allocates nothing
	if err == nil && len(data) < int(n) {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return err
	}
	return json.Unmarshal(data, v)
}

// limitSilence has the kernel break a connection that the other end does not acknowledge.
func limitSilence(conn net.Conn) {
	c, ok := conn.(*net.TCPConn)
	if !ok {
		return
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return
	}
	raw.Control(func(fd uintptr) {
		unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(deadAfter.Milliseconds()))
	})
}
