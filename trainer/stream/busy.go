package stream

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"time"
)

// BusyFilesEnv names the files that tell a simulated GPU how busy its worker is. The simulated device plugin sets it.
const BusyFilesEnv = "CAPSTAN_SIMULATED_GPU_BUSY"

// BusyFiles takes the variable's value apart: absolute paths with a colon between. A path may hold colons of its own, as
// /fakegpu/busy/GPU-…::1 does, but none before a slash.
func BusyFiles(value string) ([]string, error) {
	var files []string
	for value != "" {
		if !strings.HasPrefix(value, "/") {
			return nil, fmt.Errorf("%s: %q: want absolute paths with a colon between", BusyFilesEnv, value)
		}
		file, rest, more := strings.Cut(value, ":/")
		files = append(files, file)
		if value = ""; more {
			value = "/" + rest
		}
	}
	return files, nil
}

// meter adds up the time between begin and end. Safe for concurrent use.
type meter struct {
	mu    sync.Mutex // guards what follows
	sum   time.Duration
	since time.Time // zero: not running
}

func (m *meter) begin(now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.since = now
}

func (m *meter) end(now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.since.IsZero() {
		m.sum += max(0, now.Sub(m.since))
	}
	m.since = time.Time{}
}

func (m *meter) total(now time.Time) time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.since.IsZero() {
		return m.sum
	}
	return m.sum + max(0, now.Sub(m.since))
}

const (
	busyEvery  = 200 * time.Millisecond
	busyWindow = 4 // readings that a share spans: 0.6 s
)

// writeBusy writes the meter's share of the newest 0.6 s to the files, five times a second until ctx is done, then 0.
func writeBusy(ctx context.Context, files []string, m *meter, log *slog.Logger) {
	type reading struct {
		at   time.Time
		busy time.Duration
	}
	start := time.Now()
	readings := []reading{{start, m.total(start)}}
	ticker := time.NewTicker(busyEvery)
	defer ticker.Stop()
	broken := false
	write := func(share float64) {
		for _, f := range files {
			err := writeShare(f, share)
			if err != nil && !broken {
				log.Warn("a simulated GPU cannot be told how busy it is", "error", err)
			}
			broken = err != nil
		}
	}
	for {
		select {
		case <-ctx.Done():
			write(0)
			return
		case <-ticker.C:
		}
		now := time.Now()
		readings = append(readings, reading{now, m.total(now)})
		readings = readings[max(0, len(readings)-busyWindow):]
		first, last := readings[0], readings[len(readings)-1]
		if span := last.at.Sub(first.at); span > 0 {
			write(min(1, (last.busy-first.busy).Seconds()/span.Seconds()))
		}
	}
}

// writeShare writes 0..1 in one small write of a fixed length: whoever reads meanwhile reads the old or the new one.
func writeShare(file string, share float64) error {
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE, 0o666)
	if err != nil {
		return err
	}
	_, err = f.WriteString(fmt.Sprintf("%.3f\n", share))
	if e := f.Close(); err == nil {
		err = e
	}
	return err
}
