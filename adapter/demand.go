package adapter

import (
	"sync"
	"time"
)

// rememberAsking is how long a metric stays asked for after somebody asked: longer than anybody who asks regularly waits.
const rememberAsking = 10 * time.Minute

// demand remembers which metrics were asked for. Safe for concurrent use.
type demand struct {
	mu    sync.Mutex
	asked map[string]time.Time // by lower-case name
}

// note remembers that somebody asks now.
func (d *demand) note(metric string, now time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.asked == nil {
		d.asked = map[string]time.Time{}
	}
	d.asked[metric] = now
}

// lately says whether somebody has asked lately.
func (d *demand) lately(metric string, now time.Time) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	at, ever := d.asked[metric]
	return ever && now.Sub(at) < rememberAsking
}
