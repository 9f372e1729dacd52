package allreduce

import (
	"bytes"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"time"
)

// The handshake. The caller begins; all numbers are little-endian:
//
//	caller  → greeting: who it is, whom it wants, a nonce
//	listener→ verdict (1 byte), greeting of its own with another nonce, proof (if the verdict is welcome)
//	caller  → proof
//	listener→ verdict (1 byte)
//
// A proof is the HMAC-SHA256, under the generation's key, of the side's name and of both greetings as they were sent. So it holds for
// this connection only, none can be sent back to its maker, and who has not got the key learns nothing that would help. A greeting
// itself is no secret: a job, a generation, a rank.

const (
	maxJob     = 200
	maxChannel = 40
	nonceBytes = 32
	proofBytes = sha256.Size
	// A greeting is magic, order, job and channel with a byte of length each, generation, world, from, to, lane, nonce.
	minGreeting = len(magic) + 1 + 2 + 8 + 3*2 + 1 + nonceBytes
	maxGreeting = minGreeting + maxJob + maxChannel
)

// magic is the protocol and its version.
const magic = "capstan-allreduce/1\n"

// greeting is what a side says of itself.
type greeting struct {
	order        byte // of the bytes of a machine's numbers, in which vectors travel
	job, channel string
	generation   uint64
	world        int // up to MaxWorld, as all ranks are
	from, to     int
	lane         byte // of the link
	nonce        [nonceBytes]byte
}

// byteOrder is 1 on a little-endian machine, 2 on a big-endian one.
var byteOrder = func() byte {
	if binary.NativeEndian.Uint16([]byte{1, 0}) == 1 {
		return 1
	}
	return 2
}()

// greet is this rank's greeting to a peer, with a new nonce.
func (c Config) greet(l link) greeting {
	g := greeting{order: byteOrder, job: c.Job, channel: c.Channel, generation: c.Generation, world: c.world(), from: c.Rank, to: l.peer, lane: byte(l.lane)}
	rand.Read(g.nonce[:]) // never fails, says its contract
	return g
}

// encode is the greeting after two bytes with its length.
func (g greeting) encode() []byte {
	b := make([]byte, 2, 2+maxGreeting)
	b = append(b, magic...)
	b = append(b, g.order, byte(len(g.job)))
	b = append(b, g.job...)
	b = append(b, byte(len(g.channel)))
	b = append(b, g.channel...)
	b = binary.LittleEndian.AppendUint64(b, g.generation)
	for _, n := range []int{g.world, g.from, g.to} {
		b = binary.LittleEndian.AppendUint16(b, uint16(n))
	}
	b = append(b, g.lane)
	b = append(b, g.nonce[:]...)
	binary.LittleEndian.PutUint16(b, uint16(len(b)-2))
	return b
}

var errForeign = errors.New("does not speak " + magic[:len(magic)-1])

// decodeGreeting reads what follows the length.
func decodeGreeting(b []byte) (g greeting, err error) {
	b, ok := bytes.CutPrefix(b, []byte(magic))
	if !ok {
		return g, errForeign
	}
	take := func(n int) (head []byte) {
		if n > len(b) {
			b, err = nil, errors.New("the greeting is too short")
			return make([]byte, n)
		}
		head, b = b[:n], b[n:]
		return head
	}
	g.order = take(1)[0]
	g.job = string(take(int(take(1)[0])))
	g.channel = string(take(int(take(1)[0])))
	g.generation = binary.LittleEndian.Uint64(take(8))
	for _, n := range []*int{&g.world, &g.from, &g.to} {
		*n = int(binary.LittleEndian.Uint16(take(2)))
	}
	g.lane = take(1)[0]
	copy(g.nonce[:], take(nonceBytes))
	switch {
	case err != nil:
		return greeting{}, err
	case len(b) > 0:
		return greeting{}, fmt.Errorf("the greeting has %d bytes too many", len(b))
	case len(g.job) > maxJob || len(g.channel) > maxChannel:
		return greeting{}, fmt.Errorf("the greeting's job or channel is longer than %d and %d bytes", maxJob, maxChannel)
	}
	return g, nil
}

// readGreeting reads a greeting with its length, and returns it as it was sent, too.
func readGreeting(r io.Reader) (g greeting, sent []byte, err error) {
	sent = make([]byte, 2, 2+maxGreeting)
	if _, err := io.ReadFull(r, sent); err != nil {
		return g, nil, fmt.Errorf("read the greeting: %w", err)
	}
	n := int(binary.LittleEndian.Uint16(sent))
	if n < minGreeting || n > maxGreeting {
		return g, nil, errForeign
	}
	sent = sent[:2+n]
	if _, err := io.ReadFull(r, sent[2:]); err != nil {
		return g, nil, fmt.Errorf("read the greeting: %w", err)
	}
	g, err = decodeGreeting(sent[2:])
	return g, sent, err
}

// proof is what only who has the key can say of these greetings.
func proof(key []byte, side string, caller, listener []byte) []byte {
	h := hmac.New(sha256.New, key)
	io.WriteString(h, side)
	h.Write(caller)
	h.Write(listener)
	return h.Sum(nil)
}

// verdict is what a listener makes of a greeting or of a proof.
type verdict byte

const (
	welcome verdict = iota + 1
	notYet          // it is in an older generation, in none of this channel, or has this rank's connection already: try again
	refused         // it differs in something else
	noProof         // the key is another one
)

// Why a connection is refused, for who calls and for who listens.
var (
	ErrMismatch = errors.New("greetings differ")
	ErrKey      = errors.New("does not have the generation's key")
	errNotYet   = errors.New("is not ready for this connection")
)

// judge says whether a connection with the peer's greeting is what a side expects, whose own greeting to it is own.
func judge(own, peer greeting) (verdict, error) {
	for _, f := range []struct {
		name      string
		got, want any
		verdict   verdict
	}{
		{"byte order", peer.order, own.order, refused},
		{"job", peer.job, own.job, refused},
		{"generation", peer.generation, own.generation, refused},
		{"channel", peer.channel, own.channel, notYet},
		{"world", peer.world, own.world, refused},
		{"rank", peer.from, own.to, refused},
		{"peer's rank", peer.to, own.from, refused},
		{"lane", peer.lane, own.lane, refused},
	} {
		if f.got == f.want {
			continue
		}
		if f.name == "generation" && peer.generation > own.generation {
			f.verdict = notYet
		}
		return f.verdict, fmt.Errorf("%w: it has %s %v, want %v", ErrMismatch, f.name, f.got, f.want)
	}
	return welcome, nil
}

// call is the caller's side of the handshake for a link. An error that is errNotYet is no refusal for good.
func call(c net.Conn, cfg Config, l link, end time.Time) error {
	if err := c.SetDeadline(end); err != nil {
		return err
	}
	own := cfg.greet(l)
	said := own.encode()
	if _, err := c.Write(said); err != nil {
		return fmt.Errorf("write the greeting: %w", err)
	}
	v, err := readVerdict(c)
	if err != nil {
		return err
	}
	other, heard, err := readGreeting(c)
	if err != nil {
		return err
	}
	if _, err := judge(own, other); err != nil {
		// The listener says why in its greeting, which holds its own values. It is the one who knows whether it comes to ours.
		if v == notYet {
			return fmt.Errorf("%w: %w", errNotYet, err)
		}
		return err
	}
	if v == notYet {
		return fmt.Errorf("%w: it has one of rank %d already", errNotYet, cfg.Rank)
	}
	if v != welcome {
		return fmt.Errorf("%w: refused with verdict %d", ErrMismatch, v)
	}
	theirs := make([]byte, proofBytes)
	if _, err := io.ReadFull(c, theirs); err != nil {
		return fmt.Errorf("read the proof: %w", err)
	}
	if !hmac.Equal(theirs, proof(cfg.Key, "listener", said, heard)) {
		return ErrKey
	}
	if _, err := c.Write(proof(cfg.Key, "caller", said, heard)); err != nil {
		return fmt.Errorf("write the proof: %w", err)
	}
	switch v, err := readVerdict(c); {
	case err != nil:
		return err
	case v == notYet:
		return fmt.Errorf("%w: it has one of rank %d already", errNotYet, cfg.Rank)
	case v != welcome:
		return fmt.Errorf("%w, says it of this rank", ErrKey)
	}
	return c.SetDeadline(time.Time{})
}

func readVerdict(r io.Reader) (verdict, error) {
	var b [1]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return 0, fmt.Errorf("read the verdict: %w", err)
	}
	return verdict(b[0]), nil
}

// answer is the listener's side of the handshake, up to its last verdict, which is the caller's to give: admit. The link is one that
// expected says yes to, and the peer has the key.
func answer(c net.Conn, cfg Config, expected func(link) bool, end time.Time) (l link, err error) {
	if err := c.SetDeadline(end); err != nil {
		return l, err
	}
	other, heard, err := readGreeting(c)
	if err != nil {
		return l, err // to who does not speak the protocol nothing is said
	}
	l = link{other.from, int(other.lane)}
	own := cfg.greet(l)
	said := own.encode()
	v, err := judge(own, other)
	if err == nil && !expected(l) {
		v, err = notYet, fmt.Errorf("%w: rank %d does not call here, or has", ErrMismatch, other.from)
	}
	reply := append([]byte{byte(v)}, said...)
	if v == welcome {
		reply = append(reply, proof(cfg.Key, "listener", heard, said)...)
	}
	if _, wrote := c.Write(reply); err != nil || wrote != nil {
		return l, errors.Join(err, wrote)
	}
	theirs := make([]byte, proofBytes)
	if _, err := io.ReadFull(c, theirs); err != nil {
		return l, fmt.Errorf("read the proof: %w", err)
	}
	if !hmac.Equal(theirs, proof(cfg.Key, "caller", heard, said)) {
		c.Write([]byte{byte(noProof)})
		return l, ErrKey
	}
	return l, nil
}

// admit ends the handshake for a peer that answer let through; the connection is good for both sides then.
func admit(c net.Conn, v verdict) error {
	if _, err := c.Write([]byte{byte(v)}); err != nil {
		return fmt.Errorf("write the verdict: %w", err)
	}
	return c.SetDeadline(time.Time{})
}
