package remote

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// process is an engine that runs.
type process struct {
	binary  binary
	path    string
	dir     string // of its data, which a restart finds again
	address string
	cmd     *exec.Cmd
}

// start runs an engine with a scrape configuration, and ends it with the test.
func start(t *testing.T, b binary, scrape string) *process {
	t.Helper()
	p := &process{binary: b, path: b.build(t), dir: t.TempDir(), address: freeAddress(t)}
	if err := os.WriteFile(p.config(), []byte(scrape), 0o600); err != nil {
		t.Fatal(err)
	}
	p.run(t)
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			said, err := os.ReadFile(p.log())
			t.Logf("%s says (%v):\n%s", b.name, err, said)
		}
	})
	return p
}

func (p *process) url() string    { return "http://" + p.address }
func (p *process) config() string { return filepath.Join(p.dir, "scrape.yaml") }
func (p *process) log() string    { return filepath.Join(p.dir, "log") } // of all its runs

// run starts it, for the first time or again, and waits until it is ready.
func (p *process) run(t *testing.T) {
	t.Helper()
	data := filepath.Join(p.dir, "data")
	var args []string
	switch p.binary {
	case prometheus:
		args = []string{"--config.file=" + p.config(), "--storage.tsdb.path=" + data, "--web.listen-address=" + p.address, "--web.enable-remote-write-receiver", "--log.level=warn"}
	case victoriaMetrics: // with its -search.latencyOffset of 30 s
		args = []string{"-promscrape.config=" + p.config(), "-storageDataPath=" + data, "-httpListenAddr=" + p.address, "-retentionPeriod=1d", "-loggerLevel=WARN", "-memory.allowedBytes=256MiB"}
	}
	log, err := os.OpenFile(p.log(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close() // the process has its own
	p.cmd = exec.Command(p.path, args...)
	p.cmd.Stdout, p.cmd.Stderr = log, log
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	health := map[binary]string{prometheus: "/-/ready", victoriaMetrics: "/health"}[p.binary]
	eventually(t, 60*time.Second, func() error {
		response, err := http.Get(p.url() + health)
		if err != nil {
			return err
		}
		response.Body.Close()
		if response.StatusCode != http.StatusOK {
			return fmt.Errorf("%s is not ready: %s", p.binary.name, response.Status)
		}
		return nil
	})
}

// kill ends it as a crash would, and waits until it is gone.
func (p *process) kill() {
	p.cmd.Process.Kill()
	p.cmd.Wait()
}

// freeAddress is one of loopback on which nobody listens.
func freeAddress(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	return listener.Addr().String()
}

// eventually waits until check says nothing.
func eventually(t *testing.T, limit time.Duration, check func() error) {
	t.Helper()
	end := time.Now().Add(limit)
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("after %s: %v", limit, err)
		}
		time.Sleep(100 * time.Millisecond)
	}
}
