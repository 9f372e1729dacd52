package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// process is a running exporter.
type process struct {
	cmd    *exec.Cmd
	url    string
	client *http.Client
	done   chan struct{}
}

// listening finds the address in the log: the kernel chose the port.
var listening = regexp.MustCompile(`msg=listening.* address=(\S+)`)

// launch starts a program with the simulated driver, and waits until it listens. It says where in its log.
func launch(ctx context.Context, d *driver, program string, args ...string) (*process, error) {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = d.environ()
	log, err := cmd.StderrPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", program, err)
	}
	p := &process{cmd: cmd, done: make(chan struct{}), client: &http.Client{
		Timeout:   10 * time.Second,
		Transport: &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 100}, // as compressed as a scraper gets it, and not unpacked on our clock
	}}
	address := make(chan string, 1)
	go func() {
		defer close(p.done)
		lines := bufio.NewScanner(log)
		var last []string
		for lines.Scan() {
			if m := listening.FindStringSubmatch(lines.Text()); m != nil {
				address <- m[1]
			}
			last = append(last, lines.Text())[max(0, len(last)-20):]
		}
		if err := cmd.Wait(); err != nil && ctx.Err() == nil && !strings.Contains(err.Error(), "signal") {
			fmt.Fprintf(os.Stderr, "%s: %v\n%s\n", program, err, strings.Join(last, "\n"))
		}
	}()
	select {
	case a := <-address:
		p.url = "http://" + a + "/metrics"
		return p, nil
	case <-p.done:
		return nil, fmt.Errorf("%s ended before it listened", program)
	case <-time.After(20 * time.Second):
		p.end()
		return nil, fmt.Errorf("%s does not listen", program)
	}
}

func (p *process) end() {
	p.cmd.Process.Signal(os.Interrupt)
	select {
	case <-p.done:
	case <-time.After(10 * time.Second):
		p.cmd.Process.Kill()
		<-p.done
	}
}

// scraper is a connection that is kept, as a Prometheus keeps its own. It is no http.Client, which costs more than what is measured.
type scraper struct {
	conn   net.Conn
	reader *bufio.Reader
	ask    []byte
}

func (p *process) scraper() (*scraper, error) {
	u, err := url.Parse(p.url)
	if err != nil {
		return nil, err
	}
	conn, err := net.Dial("tcp", u.Host)
	if err != nil {
		return nil, err
	}
	ask := fmt.Appendf(nil, "GET %s HTTP/1.1\r\nHost: %s\r\nAccept-Encoding: gzip\r\nAccept: application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5\r\n\r\n", u.Path, u.Host)
	return &scraper{conn, bufio.NewReaderSize(conn, 64<<10), ask}, nil
}

// scrape asks for the compressed page, as Prometheus does, and says how long it took until the whole of it was there.
func (s *scraper) scrape() (time.Duration, error) {
	began := time.Now()
	if _, err := s.conn.Write(s.ask); err != nil {
		return 0, err
	}
	response, err := http.ReadResponse(s.reader, nil)
	if err != nil {
		return 0, err
	}
	if _, err := io.Copy(io.Discard, response.Body); err != nil {
		return 0, err
	}
	took := time.Since(began)
	if response.StatusCode != http.StatusOK || response.Header.Get("Content-Encoding") != "gzip" {
		return 0, fmt.Errorf("scrape: status %d, encoding %q", response.StatusCode, response.Header.Get("Content-Encoding"))
	}
	return took, nil
}

func (p *process) page() (string, error) {
	response, err := p.client.Get(p.url)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	b, err := io.ReadAll(response.Body)
	return string(b), err
}

// until waits until the page has n series of a family.
func (p *process) until(ctx context.Context, family string, n int) error {
	var page string
	for range 200 {
		var err error
		if page, err = p.page(); err != nil {
			return err
		}
		if strings.Count(page, "\n"+family+"{") >= n {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
	return fmt.Errorf("the page never had %d series of %s, but\n%s", n, family, page)
}

// cpu is the processor time used so far.
func (p *process) cpu() time.Duration {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
	if err != nil {
		return 0
	}
	f := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	user, _ := strconv.Atoi(f[11])
	system, _ := strconv.Atoi(f[12])
	return time.Duration(user+system) * (time.Second / 100)
}

// rss is the memory that is resident now, in MiB.
func (p *process) rss() float64 {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "VmRSS:" {
			kib, _ := strconv.ParseFloat(f[1], 64)
			return kib / 1024
		}
	}
	return 0
}
