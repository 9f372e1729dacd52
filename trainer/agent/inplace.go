package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/capstan-gpu/capstan/trainer/ring"
)

// InPlace is a [Trainer] that is a command which lives through the generations: it opens a socket to its agent (see [SocketEnv]) and
// does what [Command] says. It starts when it is to warm up, so that it has loaded everything before it is admitted.
type InPlace struct {
	process *Process // that starts and stops it
	dir     string   // of sockets
	ctl     *control
	opening time.Duration // it opens its socket within
	members []Peer
}

// openTimeout is how long a command may take to open its socket: it imports its framework first.
const openTimeout = 10 * time.Minute

// NewInPlace returns a trainer whose sockets lie in dir. An AbortTimeout of 0 is 4 s here: a command that is killed has lost its state.
func NewInPlace(cfg ProcessConfig, dir string) (*InPlace, error) {
	if cfg.AbortTimeout == 0 {
		cfg.AbortTimeout = 4 * time.Second
	}
	p, err := NewProcess(cfg)
	if err != nil {
		return nil, err
	}
	return &InPlace{process: p, dir: dir, opening: openTimeout}, nil
}

// Signal passes a signal on to the command, if it runs.
func (p *InPlace) Signal(s syscall.Signal) { p.process.Signal(s) }

// PID is the command's process, 0 if it does not run.
func (p *InPlace) PID() int { return p.process.PID() }

func (p *InPlace) stop(ctx context.Context, patience time.Duration) error {
	err := p.process.stop(ctx, patience)
	if p.ctl != nil {
		p.ctl.close()
		<-p.ctl.done
		p.ctl = nil
	}
	return err
}

// Warm is [Trainer]'s. A command that lives reads its checkpoint anew.
func (p *InPlace) Warm(ctx context.Context) (int64, error) {
	if p.ctl != nil && p.PID() != 0 {
		if a, err := p.ask(ctx, Command{Do: "warm"}); err == nil {
			return a.Step, nil
		} else if ctx.Err() != nil {
			return 0, err
		}
	}
	if err := p.stop(ctx, p.process.cfg.AbortTimeout); err != nil {
		return 0, err
	}
	var err error
	if p.ctl, err = listenControl(p.dir); err != nil {
		return 0, fmt.Errorf("open a socket for the command: %w", err)
	}
	cfg := p.process.cfg
	g, err := startGroup(cfg.Reaper, cfg.Command, append(os.Environ(), SocketEnv+"="+p.ctl.path), cfg.Stdout, cfg.Stderr)
	if err != nil {
		return 0, err
	}
	cfg.Logger.Info("started the command", "pid", g.cmd.Process.Pid)
	p.process.mu.Lock()
	p.process.proc = g
	p.process.mu.Unlock()
	if err := p.opened(ctx, g); err != nil {
		return 0, err
	}
	a, err := p.ask(ctx, Command{Do: "warm"})
	return a.Step, err
}

// opened waits until the command has opened its socket.
func (p *InPlace) opened(ctx context.Context, g *group) error {
	for begun := time.Now(); ; {
		p.ctl.mu.Lock()
		conn := p.ctl.conn
		p.ctl.mu.Unlock()
		switch {
		case conn != nil:
			return nil
		case !g.alive():
			if err := g.failure(); err != nil {
				return err
			}
			return fmt.Errorf("the command ended with code 0 and never opened the socket in %s; without --in-place it need not", SocketEnv)
		case time.Since(begun) > p.opening:
			return fmt.Errorf("the command has not opened the socket in %s within %s; without --in-place it need not", SocketEnv, p.opening)
		}
		if !sleep(ctx, 10*time.Millisecond) {
			return ctx.Err()
		}
	}
}

// ask has the command do something, and makes its answer the trainer's.
func (p *InPlace) ask(ctx context.Context, m Command) (Answer, error) {
	g := p.process.running()
	if g == nil || p.ctl == nil {
		return Answer{}, errors.New("the command does not run")
	}
	a, err := p.ctl.ask(ctx, g, m)
	switch {
	case err != nil:
		return a, err
	case a.Lost != nil && *a.Lost >= 0 && *a.Lost < len(p.members):
		return a, &PeerError{p.members[*a.Lost].ID, errors.New("the command says so")}
	case a.Lost != nil:
		return a, fmt.Errorf("%s: the command lost rank %d, of %d", m.Do, *a.Lost, len(p.members))
	case a.Error != "":
		return a, fmt.Errorf("%s: %.300s", m.Do, a.Error)
	}
	return a, nil
}

// Enter is [Trainer]'s.
func (p *InPlace) Enter(ctx context.Context, e Entry) (uint64, error) {
	env, err := p.process.cfg.Environment(e)
	if err != nil {
		return 0, fmt.Errorf("environment of generation %s: %w", e.Generation, err)
	}
	m := Command{Do: "enter", Step: e.Step, Generation: e.Generation.String(), Rank: e.Rank, World: len(e.Members), Environment: map[string]string{}}
	for _, pair := range env {
		name, value, _ := strings.Cut(pair, "=")
		m.Environment[name] = value
	}
	ranks := map[ring.ID]int{}
	for rank, peer := range e.Members {
		ranks[peer.ID] = rank
		m.Members = append(m.Members, member(peer, rank))
	}
	of := func(peer Peer) Member {
		rank, in := ranks[peer.ID]
		if !in {
			rank = -1
		}
		return member(peer, rank)
	}
	if e.From != nil {
		from := of(*e.From)
		m.From = &from
	}
	for _, to := range e.To {
		m.To = append(m.To, of(to))
	}
	p.members = e.Members
	a, err := p.ask(ctx, m)
	if err != nil || a.Hash == "" {
		return 0, err
	}
	hash, err := strconv.ParseUint(a.Hash, 16, 64)
	if err != nil {
		return 0, fmt.Errorf("enter: hash %.30q: want 16 hexadecimal digits", a.Hash)
	}
	return hash, nil
}

func member(p Peer, rank int) Member {
	host, _, err := net.SplitHostPort(p.Address)
	if err != nil {
		host = p.Address
	}
	return Member{Rank: rank, Ordinal: p.ID.Ordinal, Host: host, Data: p.Data}
}

// Run is [Trainer]'s.
func (p *InPlace) Run(ctx context.Context, s *Session) (bool, error) {
	p.ctl.onStep(func(a Answer) { s.Done(a.Step, a.QuiesceAt, time.Duration(a.Compute*float64(time.Second))) })
	defer p.ctl.onStep(nil)
	ended := make(chan struct{})
	wished := make(chan struct{})
	go func() {
		defer close(wished)
		ticker := time.NewTicker(time.Millisecond)
		defer ticker.Stop()
		for {
			select {
			case <-ended:
				return
			case <-ticker.C:
				if at := s.Wish(); at > 0 {
					p.ctl.tell(Command{Do: "wish", Step: at})
					return
				}
			}
		}
	}()
	a, err := p.ask(ctx, Command{Do: "run", Step: s.Step})
	close(ended)
	<-wished
	return a.Finished, err
}

// Park is [Trainer]'s.
func (p *InPlace) Park(ctx context.Context) error {
	_, err := p.ask(ctx, Command{Do: "park"})
	return err
}

// Abort is [Trainer]'s. A command that does not answer soon is killed, and its state is lost.
func (p *InPlace) Abort(ctx context.Context) (int64, error) {
	soon, cancel := context.WithTimeout(ctx, p.process.cfg.AbortTimeout)
	defer cancel()
	a, err := p.ask(soon, Command{Do: "abort"})
	if err == nil {
		return a.Step, nil
	}
	if stopping := p.stop(ctx, 0); stopping != nil {
		return 0, stopping
	}
	if errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("the command did not abort within %s", p.process.cfg.AbortTimeout)
	}
	return 0, err
}

// Save is [Trainer]'s.
func (p *InPlace) Save(ctx context.Context) (int64, error) {
	a, err := p.ask(ctx, Command{Do: "save"})
	return a.Step, err
}

// Close is [Trainer]'s.
func (p *InPlace) Close() {
	if err := p.stop(context.Background(), p.process.cfg.StopTimeout); err != nil {
		p.process.cfg.Logger.Error("cannot stop the command", "error", err)
	}
}
