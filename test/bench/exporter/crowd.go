package main

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/capstan-gpu/capstan/test/bench/report"
)

const (
	inCrowd = 50
	bursts  = 200 // so many that those that meet a reading of the GPUs count for what they are
)

// crowded measures fifty scrapes at once. The clients and the system share the cores with the exporter, so a server that does nothing
// but send as many bytes goes through the same bursts, in turns.
func crowded(ctx context.Context, d *driver, p *process) ([]report.Figure, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	nothing, err := launch(ctx, d, self, "-bare")
	if err != nil {
		return nil, err
	}
	defer nothing.end()
	ours, err := p.crowd()
	if err != nil {
		return nil, err
	}
	defer ours.leave()
	bare, err := nothing.crowd()
	if err != nil {
		return nil, err
	}
	defer bare.leave()
	for range bursts {
		for _, c := range []*crowd{ours, bare} {
			if err := c.burst(); err != nil {
				return nil, err
			}
		}
	}
	how := fmt.Sprintf("%d times %d scrapes at once, the clients on the same cores", bursts, inCrowd)
	return []report.Figure{
		report.AtMost("exporter_metrics_p99_ms_50_scrapers", milliseconds(p99(ours.took)), "ms", 5, how),
		report.AtMost("exporter_metrics_p99_50_scrapers_to_bare", float64(p99(ours.took))/float64(p99(bare.took)), "x", 1.5,
			fmt.Sprintf("to net/http sending %d bytes in the same bursts: p50 %.1f to %.1f ms, p99 %.1f ms", bareBytes,
				milliseconds(quantile(ours.took, 50)), milliseconds(quantile(bare.took, 50)), milliseconds(p99(bare.took)))),
	}, nil
}

// crowd is scrapers that ask at the same moment.
type crowd struct {
	scrapers []*scraper
	took     []time.Duration
}

func (p *process) crowd() (*crowd, error) {
	c := &crowd{}
	for range inCrowd {
		s, err := p.scraper()
		if err != nil {
			c.leave()
			return nil, err
		}
		c.scrapers = append(c.scrapers, s)
	}
	return c, nil
}

func (c *crowd) burst() error {
	took := make([]time.Duration, len(c.scrapers))
	start := make(chan struct{})
	var group errgroup.Group
	for i, s := range c.scrapers {
		group.Go(func() (err error) {
			<-start
			took[i], err = s.scrape()
			return err
		})
	}
	time.Sleep(50 * time.Millisecond)
	close(start)
	err := group.Wait()
	c.took = slices.Concat(c.took, took)
	return err
}

func (c *crowd) leave() {
	for _, s := range c.scrapers {
		s.conn.Close()
	}
}

// bareBytes is about what a compressed page is long.
const bareBytes = 7400

// beBare serves as many bytes as a page has, and does nothing else.
func beBare(ctx context.Context) error {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	body := make([]byte, bareBytes)
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Encoding", "gzip")
		w.Write(body)
	})}
	go func() {
		<-ctx.Done()
		server.Close()
	}()
	fmt.Fprintf(os.Stderr, "msg=listening address=%s\n", listener.Addr())
	if err := server.Serve(listener); err != http.ErrServerClosed {
		return err
	}
	return nil
}
