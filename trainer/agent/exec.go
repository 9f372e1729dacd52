package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Reaper waits for processes that nobody else waits for: as PID 1 of a container, or as a subreaper, the agent inherits whatever its
// trainer leaves behind. Safe for concurrent use.
type Reaper struct {
	mu   sync.Mutex // held over a start, so that a child that dies at once is not taken for an orphan
	ours map[int]bool
}

// NewReaper makes this process the one that inherits orphans. [Reaper.Run] starts it.
func NewReaper() (*Reaper, error) {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("become a subreaper: %w", err)
	}
	return &Reaper{ours: map[int]bool{}}, nil
}

// Run reaps orphans until ctx is done.
func (r *Reaper) Run(ctx context.Context) error {
	died := make(chan os.Signal, 1)
	signal.Notify(died, syscall.SIGCHLD)
	defer signal.Stop(died)
	for {
		r.reap()
		select {
		case <-died:
		case <-ctx.Done():
			return nil
		}
	}
}

// reap waits for the orphans that are dead, and returns the others.
func (r *Reaper) reap() (living []int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, pid := range children() {
		if r.ours[pid] {
			continue
		}
		if got, err := unix.Wait4(pid, nil, unix.WNOHANG, nil); err == nil && got == 0 {
			living = append(living, pid)
		}
	}
	return living
}

// children are the processes whose parent this one is, dead ones included.
func children() (pids []int) {
	files, _ := filepath.Glob("/proc/self/task/*/children")
	for _, f := range files {
		data, _ := os.ReadFile(f)
		for word := range strings.FieldsSeq(string(data)) {
			if pid, err := strconv.Atoi(word); err == nil {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

// start starts a command that somebody will wait for.
func (r *Reaper) start(c *exec.Cmd) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := c.Start(); err != nil {
		return err
	}
	r.ours[c.Process.Pid] = true
	return nil
}

func (r *Reaper) forget(pid int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.ours, pid)
}

// group is a command and all that it starts, as one process group.
type group struct {
	cmd    *exec.Cmd
	reaper *Reaper
	tail   *tail
	exited chan struct{} // closed when the command itself has ended; then err is set
	err    error
}

// startGroup starts a command. What it writes to its standard error also serves to say why it died.
func startGroup(reaper *Reaper, command, env []string, stdout, stderr io.Writer) (*group, error) {
	g := &group{cmd: exec.Command(command[0], command[1:]...), reaper: reaper, tail: &tail{to: stderr}, exited: make(chan struct{})}
	g.cmd.Env, g.cmd.Stdout, g.cmd.Stderr = env, stdout, g.tail
	// An agent that is killed and is not PID 1 takes the command along, which would hold a GPU.
	g.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	g.cmd.WaitDelay = time.Second // what outlives the command may hold its output open
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // it is this thread's death that the kernel goes by
		defer runtime.UnlockOSThread()
		err := reaper.start(g.cmd)
		started <- err
		if err != nil {
			return
		}
		g.err = g.cmd.Wait()
		if errors.Is(g.err, exec.ErrWaitDelay) {
			g.err = nil
		}
		reaper.forget(g.cmd.Process.Pid)
		close(g.exited)
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", command[0], err)
	}
	return g, nil
}

// alive says that the command itself has not ended.
func (g *group) alive() bool {
	select {
	case <-g.exited:
		return false
	default:
		return true
	}
}

// failure says why the command ended; nil = with code 0. Only after exited.
func (g *group) failure() error {
	if g.err == nil {
		return nil
	}
	if last := g.tail.last(); last != "" {
		return fmt.Errorf("%s: %w: %s", g.cmd.Args[0], g.err, last)
	}
	return fmt.Errorf("%s: %w", g.cmd.Args[0], g.err)
}

// signal signals the command itself.
func (g *group) signal(s syscall.Signal) {
	if g.alive() {
		g.cmd.Process.Signal(s)
	}
}

// stop ends the whole group: SIGTERM, and SIGKILL for what is left after so long, or when ctx is done. It returns when nothing that the command started is
// left, for it could hold a port or a GPU: what went to a group of its own has become an orphan, and is ours.
func (g *group) stop(ctx context.Context, patience time.Duration) error {
	pgid := g.cmd.Process.Pid
	if g.alive() && patience > 0 {
		syscall.Kill(-pgid, syscall.SIGTERM)
		timer := time.NewTimer(patience)
		select {
		case <-g.exited:
		case <-timer.C:
		case <-ctx.Done():
		}
		timer.Stop()
	}
	for begun := time.Now(); ; {
		// While one lives, or is dead and not waited for, the number is not given to another.
		err := syscall.Kill(-pgid, syscall.SIGKILL)
		orphans := g.reaper.reap()
		for _, pid := range orphans {
			syscall.Kill(pid, syscall.SIGKILL)
		}
		if errors.Is(err, syscall.ESRCH) && len(orphans) == 0 {
			<-g.exited
			return nil
		}
		if time.Since(begun) > 10*time.Second {
			return fmt.Errorf("process group %d has not ended 10 s after SIGKILL: a process hangs in the kernel", pgid)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// tail passes on what is written, and keeps the last line that says something.
type tail struct {
	to   io.Writer
	mu   sync.Mutex
	line []byte // that is being written, its beginning
	full string // the last one that was
}

// maxTail bounds a line that is kept; an exception's message is at the end of a traceback, in a line of its own.
const maxTail = 300

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	rest := p
	for len(rest) > 0 {
		line, after, ended := bytes.Cut(rest, []byte("\n"))
		if room := maxTail - len(t.line); room > 0 {
			t.line = append(t.line, line[:min(room, len(line))]...)
		}
		if ended {
			if s := strings.TrimSpace(string(t.line)); s != "" {
				t.full = s
			}
			t.line = t.line[:0]
		}
		rest = after
	}
	t.mu.Unlock()
	return t.to.Write(p)
}

func (t *tail) last() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s := strings.TrimSpace(string(t.line)); s != "" {
		return s
	}
	return t.full
}
