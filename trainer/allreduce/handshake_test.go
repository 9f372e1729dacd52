package allreduce

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// pair opens a world of two with one config changed on each side, and returns what each side gets, with what rank 0 refused.
func pair(t *testing.T, change func(listener, caller *Config)) (refused []string, listener, caller error) {
	t.Helper()
	all := configs(t, 2)
	var mu sync.Mutex
	all[0].Refused = func(_ net.Addr, err error) {
		mu.Lock()
		defer mu.Unlock()
		refused = append(refused, err.Error())
	}
	change(&all[0], &all[1])
	// Who is refused for good learns it at once; who listens waits for a right one until it is told to stop.
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	errs := make([]error, 2)
	each(2, func(r int) {
		var g *Group
		if g, errs[r] = Open(ctx, all[r]); errs[r] == nil {
			g.Close()
		}
		if r == 1 {
			cancel()
		}
	})
	return refused, errs[0], errs[1]
}

// A connection that is not what was expected is refused, and both sides say what they have and want.
func TestRefused(t *testing.T) {
	for _, c := range []struct {
		name             string
		change           func(listener, caller *Config)
		is               error
		listener, caller string
	}{
		{"an older generation calls", func(_, c *Config) { c.Generation = 6 }, ErrMismatch, "it has generation 6, want 7", "it has generation 7, want 6"},
		{"another job", func(_, c *Config) { c.Job = "job-2" }, ErrMismatch, "it has job job-2, want job-1", "it has job job-1, want job-2"},
		{"another world", func(_, c *Config) { c.Addresses = append(c.Addresses[:2:2], "127.0.0.1:1") }, ErrMismatch, "it has world 3, want 2", "it has world 2, want 3"},
		{"another key at the caller", func(_, c *Config) { c.Key = []byte("another key of 32 bytes. another") }, ErrKey, "", "does not have the generation's key"},
	} {
		t.Run(c.name, func(t *testing.T) {
			refused, listener, caller := pair(t, c.change)
			if !errors.Is(caller, c.is) || !strings.Contains(caller.Error(), c.caller) || culprit(caller) != 0 {
				t.Errorf("the caller gets %v, want %v with %q about rank 0", caller, c.is, c.caller)
			}
			if len(refused) == 0 || !slices.ContainsFunc(refused, func(s string) bool { return strings.Contains(s, c.listener) }) {
				t.Errorf("the listener refuses with %q, want %q", refused, c.listener)
			}
			if listener == nil || !strings.Contains(listener.Error(), "rank 1 has not called") || !strings.Contains(listener.Error(), c.listener) {
				t.Errorf("the listener's Open gives %v, want that rank 1 has not called, and %q", listener, c.listener)
			}
		})
	}
}

func anybody(link) bool { return true }

// meet runs both sides of a handshake on a pipe.
func meet(listener, caller Config) (l link, answered, called error) {
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	each(2, func(i int) {
		end := time.Now().Add(5 * time.Second)
		if i == 0 {
			l, answered = answer(a, listener, anybody, end)
			if answered == nil {
				answered = admit(a, welcome)
			}
			if answered != nil {
				a.Close()
			}
		} else if called = call(b, caller, link{listener.Rank, 1}, end); called != nil {
			b.Close()
		}
	})
	return l, answered, called
}

// A listener without the key is found out by the caller before it gets anything of use, and a caller without it by the listener. A side
// that sends the other's own proof back has none.
func TestKey(t *testing.T) {
	all := configs(t, 2)
	if l, answered, called := meet(all[0], all[1]); l != (link{1, 1}) || answered != nil || called != nil {
		t.Fatalf("two who agree: link %v, %v, %v", l, answered, called)
	}
	bad := all[0]
	bad.Key = bytes.Repeat([]byte{1}, 32)
	if _, answered, called := meet(bad, all[1]); !errors.Is(called, ErrKey) || answered == nil {
		t.Errorf("a listener with another key: the caller gets %v, the listener %v, want ErrKey and any", called, answered)
	}

	t.Run("reflection", func(t *testing.T) {
		// The caller knows no key, takes the listener's proof, and sends it back as its own.
		a, b := net.Pipe()
		var answered error
		each(2, func(i int) {
			end := time.Now().Add(5 * time.Second)
			if i == 0 {
				_, answered = answer(a, all[0], anybody, end)
				a.Close()
				return
			}
			b.Write(all[1].greet(link{0, 0}).encode())
			readVerdict(b)
			readGreeting(b)
			theirs := make([]byte, proofBytes)
			io.ReadFull(b, theirs)
			b.Write(theirs)
			if v, err := readVerdict(b); v != noProof {
				t.Errorf("verdict %d, %v, want %d", v, err, noProof)
			}
			b.Close()
		})
		if !errors.Is(answered, ErrKey) {
			t.Errorf("the listener gets %v, want ErrKey", answered)
		}
	})
	t.Run("replay", func(t *testing.T) {
		// Somebody recorded what a rank said, and says it again.
		var said bytes.Buffer
		a, b := net.Pipe()
		each(2, func(i int) {
			end := time.Now().Add(5 * time.Second)
			if i == 0 {
				if _, err := answer(a, all[0], anybody, end); err != nil {
					t.Error(err)
				}
				admit(a, welcome)
			} else if err := call(recorder{b, &said}, all[1], link{0, 0}, end); err != nil {
				t.Error(err)
			}
		})
		a, b = net.Pipe()
		var answered error
		each(2, func(i int) {
			if i == 0 {
				_, answered = answer(a, all[0], anybody, time.Now().Add(5*time.Second))
				a.Close()
				return
			}
			go io.Copy(io.Discard, b) // ends with a
			b.Write(said.Bytes())
		})
		if !errors.Is(answered, ErrKey) {
			t.Errorf("the listener gets %v, want ErrKey", answered)
		}
	})
}

// recorder keeps what is written.
type recorder struct {
	net.Conn
	said *bytes.Buffer
}

func (r recorder) Write(p []byte) (int, error) {
	r.said.Write(p)
	return r.Conn.Write(p)
}

// Whatever else comes to the port, the ranks find each other: garbage, another protocol, one that says nothing, one that stops midway.
func TestStrangers(t *testing.T) {
	all := configs(t, 2)
	refused := make(chan error, 10)
	all[0].Refused = func(_ net.Addr, err error) { refused <- err }
	var groups [2]*Group
	errs := make([]error, 2)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	said := [][]byte{
		[]byte("GET / HTTP/1.1\r\nHost: worker-0\r\n\r\n"),
		bytes.Repeat([]byte{0xff}, 5000),
		bytes.Repeat([]byte{0}, 5000),
		append([]byte{200, 0}, bytes.Repeat([]byte{'x'}, 200)...),
		nil,
		all[1].greet(link{0, 0}).encode()[:40],
	}
	each(2, func(r int) {
		if r == 1 {
			for _, s := range said {
				c, err := net.Dial("tcp", all[0].Addresses[0])
				if err != nil {
					t.Error(err)
					return
				}
				defer c.Close() // but only after the rank is through
				c.Write(s)
			}
			for i := range 4 { // the rest is waited for, and holds nobody up
				if err := <-refused; !errors.Is(err, errForeign) {
					t.Errorf("stranger %d: %v, want errForeign", i, err)
				}
			}
		}
		groups[r], errs[r] = Open(ctx, all[r])
	})
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	together(t, groups[:], func(g *Group) error { return g.Barrier() })
	together(t, groups[:], func(g *Group) error { return g.Close() })
}

// One listener serves generation after generation. A rank that is ahead waits until the other one is there; one that is behind is told.
func TestGenerations(t *testing.T) {
	all := configs(t, 2)
	next := []Config{all[0], all[1]}
	next[0].Generation, next[1].Generation = 8, 8
	next[0].Key, next[1].Key = bytes.Repeat([]byte{8}, 32), bytes.Repeat([]byte{8}, 32)

	// Rank 1 has gone on to generation 8 while rank 0 still opens 7: it is not heard there, and waits.
	heard := make(chan error, 100)
	old := all[0]
	old.Refused = func(_ net.Addr, err error) { heard <- err }
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var newer [2]*Group
	errs := make([]error, 2)
	each(2, func(r int) {
		if r == 1 {
			newer[1], errs[1] = Open(t.Context(), next[1])
			return
		}
		each(2, func(i int) {
			if i == 0 {
				if g, err := Open(ctx, old); err == nil {
					t.Error("generation 7 opens with a rank of generation 8")
					g.Close()
				}
				return
			}
			if err := <-heard; !strings.Contains(err.Error(), "it has generation 8, want 7") {
				t.Errorf("refused with %v, want the generations", err)
			}
			cancel()
		})
		newer[0], errs[0] = Open(t.Context(), next[0])
	})
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	together(t, newer[:], func(g *Group) error { return g.Barrier() })

	// A member of generation 7, which was cut off, comes back while generation 8 runs: nobody hears it, and the ring goes on.
	late, stop := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer stop()
	if g, err := Open(late, all[1]); err == nil {
		t.Error("a member of generation 7 gets a connection of generation 8")
		g.Close()
	}
	together(t, newer[:], func(g *Group) error { return g.Barrier() })
	together(t, newer[:], func(g *Group) error { return g.Close() })
}

// A rank that comes twice, or that does not call here, is not admitted.
func TestExpectedRanks(t *testing.T) {
	all := configs(t, 2)
	a, b := net.Pipe()
	each(2, func(i int) {
		end := time.Now().Add(5 * time.Second)
		if i == 0 {
			if _, err := answer(a, all[0], func(link) bool { return false }, end); !errors.Is(err, ErrMismatch) {
				t.Errorf("the listener gets %v, want ErrMismatch", err)
			}
			a.Close()
		} else if err := call(b, all[1], link{0, 0}, end); !errors.Is(err, errNotYet) {
			t.Errorf("the caller gets %v, want errNotYet", err)
		}
	})
	b.Close()
}

// Open ends with its context, and says who is lacking and why.
func TestOpenEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all := piped(3)
		all[1].Dial = func(context.Context, string) (net.Conn, error) { return nil, errors.New("connection refused") }
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Minute, errors.New("no ring within a minute"))
		defer cancel()
		began := time.Now()
		g, err := Open(ctx, all[1])
		if g != nil || time.Since(began) != time.Minute {
			t.Errorf("Open returns %v after %s", g, time.Since(began))
		}
		want := "open generation 7 as rank 1 of 3: no ring within a minute; rank 0 connection refused; rank 2 has not called"
		if err == nil || err.Error() != want {
			t.Errorf("%v\nwant %s", err, want)
		}
	})
}

// A rank that is lost while others are still missing ends the opening.
func TestLostWhileOpening(t *testing.T) {
	all := configs(t, 3)
	c := make(chan net.Conn, 1)
	errs := make([]error, 2)
	each(2, func(i int) {
		if i == 0 {
			_, errs[0] = Open(t.Context(), all[0]) // rank 2 never calls
			return
		}
		conn, err := net.Dial("tcp", all[0].Addresses[0])
		if err == nil {
			err = call(conn, all[1], link{0, 0}, time.Now().Add(5*time.Second))
			c <- conn
			conn.Close()
		}
		errs[1] = err
	})
	if errs[1] != nil || culprit(errs[0]) != 1 {
		t.Errorf("%v, want one that names rank 1", errs)
	}
}

func TestValidate(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(c *Config)
		want   string // "" = valid
	}{
		{"as it is", func(*Config) {}, ""},
		{"no job", func(c *Config) { c.Job = "" }, "Job has 0 bytes: want 1 to 200"},
		{"long job", func(c *Config) { c.Job = strings.Repeat("j", 201) }, "Job has 201 bytes: want 1 to 200"},
		{"long channel", func(c *Config) { c.Channel = strings.Repeat("c", 41) }, "Channel has 41 bytes: want 0 to 40"},
		{"short key", func(c *Config) { c.Key = c.Key[:15] }, "Key has 15 bytes: want 16 to 64"},
		{"alone", func(c *Config) { c.Addresses, c.Key, c.Rank, c.Listener = []string{""}, nil, 0, nil }, ""},
		{"nobody", func(c *Config) { c.Addresses = nil }, "Addresses has 0: want 1 to 4096"},
		{"rank", func(c *Config) { c.Rank = 3 }, "Rank 3: want 0 to 2"},
		{"negative rank", func(c *Config) { c.Rank = -1 }, "Rank -1: want 0 to 2"},
		{"timeout", func(c *Config) { c.Timeout = time.Millisecond }, "Timeout 1ms: want 10ms to 1h"},
		{"no listener", func(c *Config) { c.Listener = nil }, "Listener is nil: want one, for rank 2 calls here"},
		{"no listener at the last rank", func(c *Config) { c.Listener, c.Rank = nil, 2 }, ""},
	} {
		cfg := piped(3)[1]
		c.change(&cfg)
		err := cfg.Validate()
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
	}
}

// FuzzGreeting: what is decoded is what would be encoded, so there is one spelling of a greeting and no byte without a meaning.
func FuzzGreeting(f *testing.F) {
	f.Add(Config{Job: "job-1", Channel: "state", Generation: 1 << 60, Rank: 3, Addresses: make([]string, MaxWorld)}.greet(link{4095, 1}).encode()[2:])
	f.Add(Config{Addresses: make([]string, 1)}.greet(link{0, 0}).encode()[2:])
	f.Add([]byte(magic))
	f.Fuzz(func(t *testing.T, data []byte) {
		g, err := decodeGreeting(data)
		if err != nil {
			return
		}
		if again := g.encode()[2:]; !bytes.Equal(again, data) {
			t.Errorf("%q decodes to %+v, which encodes to %q", data, g, again)
		}
	})
}

// FuzzAnswer: whatever a stranger without the key sends, it is not admitted, and the listener comes to an end with it.
func FuzzAnswer(f *testing.F) {
	cfg := Config{Job: "job-1", Generation: 7, Key: key, Rank: 0, Addresses: make([]string, 2)}
	caller := cfg
	caller.Rank = 1
	f.Add(append(caller.greet(link{0, 0}).encode(), make([]byte, proofBytes)...))
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		c := &script{in: bytes.NewReader(data)}
		if l, err := answer(c, cfg, anybody, time.Time{}); err == nil {
			t.Errorf("admitted as %v", l)
		}
		if c.out > 1+2+maxGreeting+proofBytes+1 {
			t.Errorf("the listener says %d bytes", c.out)
		}
	})
}

// script is a peer that has said all it will, and listens.
type script struct {
	net.Conn
	in  io.Reader
	out int
}

func (s *script) Read(p []byte) (int, error)  { return s.in.Read(p) }
func (s *script) Write(p []byte) (int, error) { s.out += len(p); return len(p), nil }
func (s *script) SetDeadline(time.Time) error { return nil }
