// Package trainer reads the stats pages of the trainers on this node. A page is hostile input: whoever may start a pod may
// answer anything, for ever, and would like to speak for somebody else's pod or to make the exporter fetch something for him.
//
// So the package reads only from a pod's own address on this node, bounds everything (time, bytes, lines, labels, how many
// reads at once), follows nothing, inflates nothing, lets only known names through, and takes who is speaking from the
// kubelet, never from the page. What breaks a bound is refused whole and counted under a [Reason].
package trainer

import (
	"cmp"
	"context"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/capstan-gpu/capstan/trainer/stats"
)

// Bounds on one read, beside those of package stats.
const (
	MaxHeader = 16 << 10 // bytes
	MaxLines  = 1024     // of any kind
	MaxLine   = 8 << 10  // bytes

	HeaderTimeout  = time.Second
	RequestTimeout = 2 * time.Second // all of it: connect, headers, body
	Parallel       = 8               // reads at once, of all pods of the node
)

// Pod is what is asked of a pod, all of it from the kubelet.
type Pod struct {
	Namespace, Name, UID string
	IP                   string
	HostNetwork          bool
	Port, Path           string // its annotations, unchecked; no Port = it has no page
}

// Sample is one number of a page.
type Sample struct {
	Family *stats.Family
	Labels []string // values, in the order of Family.Labels; one that the page left out is ""
	Value  float64  // finite, 0 to stats.MaxNumber
}

// Page is what one pod's page said. Immutable.
type Page struct {
	Namespace, Pod, UID string
	At                  time.Time // of the read, by our clock; the page's own timestamps mean nothing
	First               time.Time // of the first read: the page's counters were followed from then to At
	Samples             []Sample
}

// Result is all that is known from the pages of this node. Immutable.
type Result struct {
	Pages   []Page            // not older than three intervals, of pods that are still there; sorted by namespace, pod, UID
	Reads   map[string]uint64 // so far, by [Reason]
	Refused map[string]uint64 // single samples that were left out of good pages so far, by [Reason]
}

// Config is what a Reader needs.
type Config struct {
	Interval time.Duration           // between two reads of one page
	Pods     func() []Pod            // the live pods of this node; safe for concurrent use
	Families []stats.Family          // that are let through; none = every page is empty
	Began    func(time.Time)         // called at the start of every cycle; may be nil
	Ended    func(time.Time, Result) // called at the end of every cycle and when a page was read, never twice at once
	// HostNetwork lets pods in the host's network have a page. Any process of such a pod can then answer for another that is not
	// listening, though only under that pod's own name on the page.
	HostNetwork bool
	Logger      *slog.Logger
}

// state is what is remembered of one pod.
type state struct {
	page      *Page
	first     time.Time // when a page of it was read first
	reason    string    // of the newest read
	failures  int       // in a row
	tried     time.Time
	notBefore time.Time // the breaker: no read before this
}

// reader is one Run.
type reader struct {
	cfg     Config
	known   map[string]*stats.Family
	client  *client
	targets func([]Pod) ([]target, map[string]string) // targetsOf; tests have no pods' addresses

	mu      sync.Mutex // guards what follows
	pods    map[string]*state
	reads   map[string]uint64
	refused map[string]uint64
}

// Run reads the pages until ctx is done, and returns nil then. It blocks; a page that cannot be read is no error.
func Run(ctx context.Context, cfg Config) error {
	r := newReader(cfg)
	ticker := time.NewTicker(cfg.Interval)
	defer ticker.Stop()
	for {
		r.cycle(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

func newReader(cfg Config) *reader {
	r := &reader{cfg: cfg, client: newClient(), targets: func(pods []Pod) ([]target, map[string]string) { return targetsOf(pods, cfg.HostNetwork) }, known: map[string]*stats.Family{}, pods: map[string]*state{},
		reads: map[string]uint64{}, refused: map[string]uint64{}}
	for i, f := range cfg.Families {
		r.known[f.Name] = &cfg.Families[i]
	}
	return r
}

// cycle reads every page that is due, good ones first, so that no number of bad ones keeps them waiting. What cannot begin
// early enough to end within the interval is left for the next cycle, where it comes before the bad ones that were tried.
func (r *reader) cycle(ctx context.Context) {
	began := time.Now()
	if r.cfg.Began != nil {
		r.cfg.Began(began)
	}
	var group errgroup.Group
	group.SetLimit(Parallel)
	for _, t := range r.due(began) {
		if ctx.Err() != nil || time.Since(began) > max(r.cfg.Interval-RequestTimeout, r.cfg.Interval/2) {
			break
		}
		group.Go(func() error {
			r.read(ctx, t)
			return nil
		})
	}
	_ = group.Wait() // nothing above returns one
	r.publish(time.Now())
}

// due lists whom to read now, and forgets pods that are gone.
func (r *reader) due(now time.Time) []target {
	targets, bad := r.targets(r.cfg.Pods())
	r.mu.Lock()
	defer r.mu.Unlock()
	there := map[string]bool{}
	for _, t := range targets {
		there[t.uid] = true
	}
	for uid, reason := range bad {
		there[uid] = true
		s := r.state(uid)
		s.page, s.reason = nil, reason
		r.reads[reason]++
	}
	maps.DeleteFunc(r.pods, func(uid string, _ *state) bool { return !there[uid] })
	targets = slices.DeleteFunc(targets, func(t target) bool { return now.Before(r.state(t.uid).notBefore) })
	slices.SortStableFunc(targets, func(a, b target) int {
		x, y := r.pods[a.uid], r.pods[b.uid]
		if good := x.reason == ReasonOK; good != (y.reason == ReasonOK) {
			if good {
				return -1
			}
			return 1
		}
		return x.tried.Compare(y.tried)
	})
	return targets
}

func (r *reader) state(uid string) *state {
	s := r.pods[uid]
	if s == nil {
		s = &state{}
		r.pods[uid] = s
	}
	return s
}

// read reads one page and takes note of how it went.
func (r *reader) read(ctx context.Context, t target) {
	began := time.Now()
	samples, refused, err := r.client.read(ctx, t, r.known)
	now := time.Now()
	if ctx.Err() != nil {
		return
	}
	reason := reasonOf(err)
	// An address passes on to the next pod within seconds: what was read counts only if it is still this pod's.
	if again, _ := r.targets(r.cfg.Pods()); reason == ReasonOK && !slices.Contains(again, t) {
		reason = ReasonMoved
	}
	r.mu.Lock()
	s := r.state(t.uid)
	before := s.reason
	s.reason, s.tried = reason, began
	r.reads[reason]++
	for why, n := range refused {
		r.refused[why] += n
	}
	if reason == ReasonOK {
		s.failures, s.notBefore = 0, time.Time{}
		s.first = cmp.Or(s.first, now)
		s.page = &Page{Namespace: t.namespace, Pod: t.pod, UID: t.uid, At: now, First: s.first, Samples: samples}
	} else {
		s.failures++
		s.notBefore = breaker(now, now.Sub(began), s.failures, r.cfg.Interval)
	}
	r.mu.Unlock()
	if before != reason {
		r.cfg.Logger.Info("stats page", "namespace", t.namespace, "pod", t.pod, "result", reason, "was", before, "error", err)
	}
	if reason == ReasonOK {
		r.publish(now)
	}
}

// breaker says when a page that failed is tried again: at once after the first failure, then after 2, 4, 8 intervals. A failure
// that cost us little, like a trainer that does not listen yet, at most 15 s later; one that held a slot, 60 s.
func breaker(now time.Time, took time.Duration, failures int, interval time.Duration) time.Time {
	if failures < 2 {
		return time.Time{}
	}
	most := time.Minute
	if took < 100*time.Millisecond {
		most = 15 * time.Second
	}
	return now.Add(min(most, interval<<min(failures-1, 10)))
}

// publish hands on what is known.
func (r *reader) publish(now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	result := Result{Reads: maps.Clone(r.reads), Refused: maps.Clone(r.refused)}
	for _, s := range r.pods {
		if s.page != nil && now.Sub(s.page.At) <= 3*r.cfg.Interval {
			result.Pages = append(result.Pages, *s.page)
		}
	}
	slices.SortFunc(result.Pages, func(a, b Page) int {
		return strings.Compare(a.Namespace+"\x00"+a.Pod+"\x00"+a.UID, b.Namespace+"\x00"+b.Pod+"\x00"+b.UID)
	})
	r.cfg.Ended(now, result)
}
