package agent

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"syscall"
	"time"
)

// ProcessConfig is what a [Process] needs.
type ProcessConfig struct {
	Command []string
	// Environment is what the command gets beside the agent's own environment: who is in the generation, and what its framework calls it.
	Environment func(Entry) ([]string, error)
	Reaper      *Reaper
	Stdout      io.Writer
	Stderr      io.Writer
	Logger      *slog.Logger

	StopTimeout  time.Duration // from SIGTERM to SIGKILL, for a command that may write a checkpoint meanwhile; 0 = 20 s
	AbortTimeout time.Duration // the same where a peer is lost, and others wait; 0 = 1 s
}

// abate is how long the end of a command is not believed to be its own fault: a command dies when those of its peers are stopped, and
// the agent may hear of that a little later.
const abate = 500 * time.Millisecond

// Process is a [Trainer] that is any command, started anew for each generation, with an environment that says who is in it. The command
// knows nothing of all this: it reads its newest checkpoint when it starts, writes one at SIGTERM or from time to time, and exits 0
// when the job is done. Where its steps cannot be seen, a generation counts as one step.
//
// Its state lies where all workers can read it, so there is nothing to copy.
type Process struct {
	cfg ProcessConfig

	mu   sync.Mutex // guards what Signal uses too
	proc *group
	step int64
}

// NewProcess checks the configuration.
func NewProcess(cfg ProcessConfig) (*Process, error) {
	if len(cfg.Command) == 0 {
		return nil, fmt.Errorf("no command: give one after --, such as capstan-agent -- python train.py")
	}
	if cfg.StopTimeout == 0 {
		cfg.StopTimeout = 20 * time.Second
	}
	if cfg.AbortTimeout == 0 {
		cfg.AbortTimeout = time.Second
	}
	return &Process{cfg: cfg}, nil
}

// Signal passes a signal on to the command, if it runs.
func (p *Process) Signal(s syscall.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.proc != nil {
		p.proc.signal(s)
	}
}

// PID is the command's process, 0 if it does not run.
func (p *Process) PID() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.proc == nil || !p.proc.alive() {
		return 0
	}
	return p.proc.cmd.Process.Pid
}

func (p *Process) running() *group {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.proc
}

// stop ends the command and all that it started.
func (p *Process) stop(ctx context.Context, patience time.Duration) error {
	g := p.running()
	if g == nil {
		return nil
	}
	pid, begun := g.cmd.Process.Pid, time.Now()
	if err := g.stop(ctx, patience); err != nil {
		return err
	}
	p.cfg.Logger.Info("stopped the command", "pid", pid, "took", time.Since(begun).Round(time.Millisecond))
	p.mu.Lock()
	p.proc = nil
	p.mu.Unlock()
	return nil
}

// Warm is [Trainer]'s.
func (p *Process) Warm(ctx context.Context) (int64, error) {
	p.step = 0
	return 0, p.stop(ctx, p.cfg.AbortTimeout)
}

// Enter is [Trainer]'s: none of the generation before may be left, then the command starts.
func (p *Process) Enter(ctx context.Context, e Entry) (uint64, error) {
	if e.Rank < 0 {
		return 0, nil // the state is where all can read it
	}
	if err := p.stop(ctx, p.cfg.AbortTimeout); err != nil {
		return 0, err
	}
	env, err := p.cfg.Environment(e)
	if err != nil {
		return 0, fmt.Errorf("environment of generation %s: %w", e.Generation, err)
	}
	g, err := startGroup(p.cfg.Reaper, p.cfg.Command, append(os.Environ(), env...), p.cfg.Stdout, p.cfg.Stderr)
	if err != nil {
		return 0, err
	}
	p.cfg.Logger.Info("started the command", "pid", g.cmd.Process.Pid, "generation", e.Generation, "rank", e.Rank, "world", len(e.Members))
	p.mu.Lock()
	p.proc = g
	p.mu.Unlock()
	p.step = e.Step
	return 0, nil
}

// Run is [Trainer]'s: it waits for the command's end, or for the wish to stop it.
func (p *Process) Run(ctx context.Context, s *Session) (bool, error) {
	g := p.running()
	exited := g.exited
	var believed <-chan time.Time // from then on its end is its own fault
	wish := time.NewTicker(20 * time.Millisecond)
	defer wish.Stop()
	for {
		select {
		case <-ctx.Done():
			return false, ctx.Err()
		case <-exited:
			exited = nil
			if g.failure() == nil {
				p.step++
				s.Done(p.step, 0, 0)
				return true, nil
			}
			believed = time.After(abate)
		case <-believed:
			return false, g.failure()
		case <-wish.C:
			if s.Wish() == 0 {
				continue
			}
			if err := p.boundary(ctx, g, s); err != nil {
				return false, err
			}
			p.step++
			s.Done(p.step, p.step, 0)
			return false, nil
		}
	}
}

// boundary has the command write its checkpoint and end.
func (p *Process) boundary(ctx context.Context, g *group, s *Session) error {
	if !g.alive() {
		return nil
	}
	begun := time.Now()
	if err := g.stop(ctx, p.cfg.StopTimeout); err != nil {
		return err
	}
	took := time.Since(begun)
	if took >= p.cfg.StopTimeout {
		p.cfg.Logger.Warn("the command was killed, for it had not ended in time: its checkpoint may be cut off; raise --stop-timeout and the grace", "timeout", p.cfg.StopTimeout)
	}
	s.Saved(took)
	return nil
}

// Park is [Trainer]'s.
func (p *Process) Park(ctx context.Context) error { return p.stop(ctx, p.cfg.StopTimeout) }

// Abort is [Trainer]'s.
func (p *Process) Abort(ctx context.Context) (int64, error) {
	return p.step, p.stop(ctx, p.cfg.AbortTimeout)
}

// Save is [Trainer]'s. The command does that by itself.
func (p *Process) Save(context.Context) (int64, error) { return p.step, nil }

// Close is [Trainer]'s.
func (p *Process) Close() {
	if err := p.stop(context.Background(), p.cfg.StopTimeout); err != nil {
		p.cfg.Logger.Error("cannot stop the command", "error", err)
	}
}
