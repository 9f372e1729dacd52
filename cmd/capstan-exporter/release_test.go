package main

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// program is this test binary, started as the program itself.
func program(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return &exec.Cmd{Path: path, Args: append([]string{"capstan-exporter"}, args...)}
}

// TestRelease tells a running exporter to let go of the driver and to take it up again, as one would in its container.
func TestRelease(t *testing.T) {
	running := program(t, "--listen", "127.0.0.1:0", "--nvml-library", t.TempDir()+"/none.so", "--kubelet-dir", t.TempDir(), "--interval", "100ms")
	log, err := running.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := running.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		running.Process.Signal(os.Interrupt)
		if err := running.Wait(); err != nil {
			t.Errorf("the exporter ended with %v", err)
		}
	})
	address := ""
	lines := bufio.NewScanner(log)
	for address == "" && lines.Scan() {
		if m := regexp.MustCompile(`address=(\S+)`).FindStringSubmatch(lines.Text()); m != nil {
			address = m[1]
		}
	}
	go io.Copy(io.Discard, log)
	ready := func(want bool) {
		t.Helper()
		var body []byte
		for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
			if response, err := http.Get("http://" + address + "/readyz"); err == nil {
				body, _ = io.ReadAll(response.Body)
				response.Body.Close()
				if strings.Contains(string(body), "let go of on request") == want {
					return
				}
			}
		}
		t.Fatalf("/readyz says %s; want released: %t", body, want)
	}
	pid := strconv.Itoa(running.Process.Pid)
	ready(false)
	out, err := program(t, "release", "--pid", pid).CombinedOutput()
	if err != nil || string(out) != fmt.Sprintf("process %s holds nothing of the driver\n", pid) {
		t.Fatalf("release: %v\n%s", err, out)
	}
	ready(true)
	if out, err := program(t, "resume", "--pid", pid).CombinedOutput(); err != nil || !strings.Contains(string(out), "takes the driver up again") {
		t.Fatalf("resume: %v\n%s", err, out)
	}
	ready(false)
}

// The signal would end any other process.
func TestReleaseSignalsOnlyAnExporter(t *testing.T) {
	other := exec.Command("sleep", "60")
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { other.Process.Kill(); other.Wait() })
	out, err := program(t, "release", "--pid", strconv.Itoa(other.Process.Pid)).CombinedOutput()
	if err == nil || !strings.Contains(string(out), `is "sleep", not capstan-exporter`) {
		t.Errorf("%v\n%s", err, out)
	}
	if err := other.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("the other process: %v; want it alive", err)
	}
}
