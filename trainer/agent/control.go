package agent

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"
)

// SocketEnv names the environment variable with the path of the socket on which an [InPlace] command talks to its agent.
const SocketEnv = "CAPSTAN_SOCKET"

// Command is what the agent wants of a command that re-rings in place: one line of JSON on the socket. Each but wish is answered by one
// [Answer] with its ID. What comes before the one before was answered, but a wish, means that nobody waits for that answer any more.
type Command struct {
	ID int64  `json:"id"`
	Do string `json:"do"` // warm, enter, run, wish, park, abort or save, as in [Trainer]

	Step        int64             `json:"step"`                  // enter, run: steps in the state; wish: the step after which to stop
	Generation  string            `json:"generation,omitempty"`  // enter
	Rank        int               `json:"rank"`                  // enter; -1 = not in the generation
	World       int               `json:"world,omitempty"`       // enter
	Members     []Member          `json:"members,omitempty"`     // enter; by rank
	From        *Member           `json:"from,omitempty"`        // enter: whose state is to be copied here
	To          []Member          `json:"to,omitempty"`          // enter: who copies the state here
	Environment map[string]string `json:"environment,omitempty"` // enter: what a command that starts anew would find in its own
}

// Member is a worker of a generation, for a command.
type Member struct {
	Rank    int    `json:"rank"` // -1 = it is not in the generation
	Ordinal int    `json:"ordinal"`
	Host    string `json:"host"`
	Data    string `json:"data,omitempty"` // [Peer.Data]
}

// Answer is what the command says: one line of JSON. With the ID of a [Command] it answers that one; without, it is a step that was done.
type Answer struct {
	ID       int64  `json:"id"`
	Step     int64  `json:"step"`               // warm, abort, save: as in [Trainer]; without an ID: the step that was done
	Hash     string `json:"hash,omitempty"`     // enter: 16 hexadecimal digits; left out = not computed
	Finished bool   `json:"finished,omitempty"` // run: the job's last step was done
	Lost     *int   `json:"lost,omitempty"`     // enter, run: rank of the member whose connection broke; the state is still good
	Error    string `json:"error,omitempty"`    // the state is lost

	QuiesceAt int64   `json:"quiesce_at,omitempty"` // of a step: the maximum of all wishes in its all-reduce
	Compute   float64 `json:"compute,omitempty"`    // of a step: seconds, without waiting for others
}

// maxLine bounds what a command can make the agent keep.
const maxLine = 64 << 10

// control is the agent's end of the socket.
type control struct {
	listener net.Listener
	path     string
	done     chan struct{} // closed when the connection, or the wait for one, has ended

	mu      sync.Mutex
	conn    net.Conn
	ids     int64
	waiting map[int64]chan Answer
	step    func(Answer)
	err     error
}

// listenControl opens the socket for one command, in a folder that only this user can enter.
func listenControl(dir string) (*control, error) {
	f, err := os.CreateTemp(dir, "control-*.sock")
	if err != nil {
		return nil, err
	}
	path := f.Name()
	f.Close()
	os.Remove(path)
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	c := &control{listener: l, path: path, done: make(chan struct{}), waiting: map[int64]chan Answer{}}
	go c.serve()
	return c, nil
}

// serve takes one connection and reads it.
func (c *control) serve() {
	err := c.read()
	c.mu.Lock()
	c.err = err
	c.mu.Unlock()
	c.close()
	close(c.done)
}

func (c *control) read() error {
	conn, err := c.listener.Accept()
	if err != nil {
		return err
	}
	c.mu.Lock()
	c.conn = conn
	c.mu.Unlock()
	lines := bufio.NewScanner(conn)
	lines.Buffer(nil, maxLine)
	for lines.Scan() {
		var a Answer
		if err := json.Unmarshal(lines.Bytes(), &a); err != nil {
			return fmt.Errorf("the command says what is no answer: %.100q: %w", lines.Text(), err)
		}
		c.mu.Lock()
		w, step := c.waiting[a.ID], c.step
		delete(c.waiting, a.ID)
		c.mu.Unlock()
		switch {
		case w != nil:
			w <- a
		case a.ID == 0 && step != nil:
			step(a)
		}
	}
	if err := lines.Err(); err != nil {
		return err
	}
	return errors.New("the command has closed its socket")
}

func (c *control) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.listener.Close()
	if c.conn != nil {
		c.conn.Close()
	}
}

// onStep has each step that the command tells of go to f; nil = nowhere.
func (c *control) onStep(f func(Answer)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.step = f
}

// tell sends a command that has no answer.
func (c *control) tell(m Command) error { return c.send(m, nil) }

// send sends a command. Only the newest one's answer is waited for.
func (c *control) send(m Command, answer chan Answer) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.conn == nil {
		return errors.New("the command has not opened its socket")
	}
	c.ids++
	m.ID = c.ids
	if answer != nil {
		clear(c.waiting)
		c.waiting[m.ID] = answer
	}
	line, err := json.Marshal(m)
	if err != nil {
		return err
	}
	c.conn.SetWriteDeadline(time.Now().Add(time.Second)) // one who does not read holds nobody up
	_, err = c.conn.Write(append(line, '\n'))
	return err
}

// ask sends a command and waits for the answer, for the end of the process, or for ctx.
func (c *control) ask(ctx context.Context, g *group, m Command) (Answer, error) {
	answer := make(chan Answer, 1)
	if err := c.send(m, answer); err != nil {
		return Answer{}, fmt.Errorf("%s: %w", m.Do, err)
	}
	select {
	case a := <-answer:
		return a, nil
	case <-ctx.Done():
		return Answer{}, ctx.Err()
	case <-g.exited:
		if err := g.failure(); err != nil {
			return Answer{}, err
		}
		return Answer{}, fmt.Errorf("the command ended with code 0 in the midst of %s; it is to say that it has finished, and wait", m.Do)
	case <-c.done:
		// It has probably died, and how, it is about to say.
		select {
		case <-g.exited:
			if err := g.failure(); err != nil {
				return Answer{}, err
			}
		case <-ctx.Done():
			return Answer{}, ctx.Err()
		case <-time.After(time.Second):
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		return Answer{}, fmt.Errorf("%s: %w", m.Do, c.err)
	}
}
