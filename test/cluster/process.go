package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// process is a program that the cluster started. It is known by pid and by when it began, so that a pid that the kernel has given
// to somebody else is never ended.
type process struct {
	file string // where it is recorded

	PID   int    `json:"pid"`
	Began string `json:"began"` // field 22 of /proc/PID/stat: clock ticks since the machine's start
}

func (c *Cluster) process(name string) *process {
	p := &process{file: c.path("run", name+".json")}
	if data, err := os.ReadFile(p.file); err == nil {
		_ = json.Unmarshal(data, p) // a torn record is one of no process
	}
	return p
}

func (p *process) alive() bool {
	began, state := startOf(p.PID)
	return p.PID > 1 && began != "" && began == p.Began && state != "Z"
}

// startOf returns when a process began and its state; empty when there is none.
func startOf(pid int) (began, state string) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", ""
	}
	return parseStat(string(data))
}

// parseStat reads fields 22 and 3 of /proc/PID/stat; the second field, a name in parentheses, may hold anything.
func parseStat(text string) (began, state string) {
	i := strings.LastIndexByte(text, ')')
	if i < 0 {
		return "", ""
	}
	fields := strings.Fields(text[i+1:])
	if len(fields) < 20 {
		return "", ""
	}
	return fields[19], fields[0]
}

// start runs a program in the background, its output in log/NAME.log, unless it runs already.
func (c *Cluster) start(name string, extra []*os.File, args ...string) error {
	p := c.process(name)
	if p.alive() {
		return nil
	}
	log, err := os.OpenFile(c.path("log", name+".log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = log, log, extra
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), "PATH="+c.Bin+":"+os.Getenv("PATH")+":/usr/sbin:/sbin")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", name, err)
	}
	p.PID = cmd.Process.Pid
	p.Began, _ = startOf(p.PID)
	data, err := json.Marshal(p)
	if err != nil {
		return err
	}
	go func() { _ = cmd.Wait() }() // it outlives us, unless it ends while we look
	return os.WriteFile(p.file, data, 0o644)
}

// stop ends a process: asks it first, and insists after the patience is over.
func (p *process) stop(patience time.Duration) error {
	for _, signal := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		if !p.alive() {
			break
		}
		if err := syscall.Kill(p.PID, signal); err != nil {
			break
		}
		for end := time.Now().Add(patience); p.alive() && time.Now().Before(end); {
			time.Sleep(20 * time.Millisecond)
		}
		patience = 5 * time.Second
	}
	if p.alive() {
		return fmt.Errorf("process %d of %s does not end", p.PID, filepath.Base(p.file))
	}
	if err := os.Remove(p.file); err != nil && !os.IsNotExist(err) {
		return err
	}
	return nil
}
