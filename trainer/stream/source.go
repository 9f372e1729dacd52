package stream

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"
)

// The source's interface: JSON over HTTP.
//
//	GET  /status   the account, a [Status]
//	PUT  /rate     a rateRequest
//	POST /pull     a pullRequest; answers a [Work], or 204 when there was none for ten seconds
//	POST /done     a doneRequest; 409 when the lease is no longer the worker's
//	GET  /healthz  200

type rateRequest struct {
	Rate *float64 `json:"rate"` // samples/s
}

type pullRequest struct {
	Worker string `json:"worker"`
	Max    int64  `json:"max"` // samples
}

type doneRequest struct {
	Worker    string `json:"worker"`
	Lease     string `json:"lease"`
	Completed int64  `json:"completed"` // samples, the first ones of the lease; the rest goes back
}

// Work is a lease on the wire.
type Work struct {
	Lease string `json:"lease"` // the source's run, a dash, the lease's number
	First int64  `json:"first"`
	Count int64  `json:"count"`
}

const (
	maxRequest = 4 << 10 // bytes of a request's body
	pullWait   = 10 * time.Second
	tick       = 20 * time.Millisecond
)

// Source serves one [Stream]. Safe for concurrent use.
type Source struct {
	run string // tells this source's leases from those of the one before it
	log *slog.Logger

	mu     sync.Mutex // guards what follows
	stream *Stream
	pulls  map[uint64]chan Lease // by ticket; each has room for its one answer
}

// NewSource returns a source that begins to offer now. [Source.Run] makes it hand out.
func NewSource(cfg Config, logger *slog.Logger) (*Source, error) {
	s, err := New(cfg, time.Now())
	if err != nil {
		return nil, err
	}
	run := make([]byte, 4)
	rand.Read(run)
	return &Source{run: hex.EncodeToString(run), log: logger, stream: s, pulls: map[uint64]chan Lease{}}, nil
}

// Run hands out samples until ctx is done, and returns nil then.
func (s *Source) Run(ctx context.Context) error {
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
			s.mu.Lock()
			s.deliver()
			s.mu.Unlock()
		}
	}
}

// deliver answers the pulls that can be answered. The caller holds mu.
func (s *Source) deliver() {
	for _, g := range s.stream.Tick(time.Now()) {
		s.pulls[g.Ticket] <- g.Lease
		delete(s.pulls, g.Ticket)
	}
}

// Status is the account now.
func (s *Source) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stream.Status(time.Now())
}

// Handler serves the source's interface.
func (s *Source) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, _ *http.Request) { answer(w, http.StatusOK, s.Status()) })
	mux.HandleFunc("PUT /rate", s.rate)
	mux.HandleFunc("POST /pull", s.pull)
	mux.HandleFunc("POST /done", s.done)
	return mux
}

func (s *Source) rate(w http.ResponseWriter, r *http.Request) {
	var request rateRequest
	if !read(w, r, &request) {
		return
	}
	if request.Rate == nil {
		refuse(w, http.StatusBadRequest, errors.New(`want a body like {"rate": 300}`))
		return
	}
	s.mu.Lock()
	old := s.stream.rate
	err := s.stream.SetRate(*request.Rate, time.Now())
	s.mu.Unlock()
	if err != nil {
		refuse(w, http.StatusBadRequest, err)
		return
	}
	s.log.Info("rate changed", "from", old, "to", *request.Rate)
	answer(w, http.StatusOK, request)
}

func (s *Source) pull(w http.ResponseWriter, r *http.Request) {
	var request pullRequest
	if !read(w, r, &request) {
		return
	}
	granted := make(chan Lease, 1)
	s.mu.Lock()
	ticket, err := s.stream.Pull(request.Worker, request.Max, time.Now())
	if err == nil {
		s.pulls[ticket] = granted
		s.deliver()
	}
	s.mu.Unlock()
	if err != nil {
		refuse(w, http.StatusBadRequest, err)
		return
	}
	timeout := time.NewTimer(pullWait)
	defer timeout.Stop()
	select {
	case l := <-granted:
		answer(w, http.StatusOK, Work{Lease: s.run + "-" + strconv.FormatUint(l.ID, 10), First: l.First, Count: l.Count})
		return
	case <-r.Context().Done():
	case <-timeout.C:
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stream.Cancel(ticket)
	delete(s.pulls, ticket)
	select {
	case l := <-granted: // at the same moment; nobody will hear of it
		s.stream.Settle(l.ID, l.Worker, 0, time.Now())
	default:
	}
	w.WriteHeader(http.StatusNoContent)
}

func (s *Source) done(w http.ResponseWriter, r *http.Request) {
	var request doneRequest
	if !read(w, r, &request) {
		return
	}
	run, number, _ := strings.Cut(request.Lease, "-")
	id, err := strconv.ParseUint(number, 10, 64)
	if err != nil {
		refuse(w, http.StatusBadRequest, fmt.Errorf("lease %q: want one that /pull gave", request.Lease))
		return
	}
	if run != s.run {
		id = 0 // of a source before this one: the same numbers mean other samples
	}
	s.mu.Lock()
	err = s.stream.Settle(id, request.Worker, request.Completed, time.Now())
	s.deliver()
	s.mu.Unlock()
	switch {
	case errors.Is(err, ErrLate):
		refuse(w, http.StatusConflict, err)
	case err != nil:
		refuse(w, http.StatusBadRequest, err)
	default:
		answer(w, http.StatusOK, struct{}{})
	}
}

// read decodes a request's body, or answers why it cannot.
func read(w http.ResponseWriter, r *http.Request, into any) bool {
	d := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxRequest))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		refuse(w, http.StatusBadRequest, fmt.Errorf("decode the request: %w", err))
		return false
	}
	return true
}

func refuse(w http.ResponseWriter, status int, err error) {
	answer(w, status, map[string]string{"error": err.Error()})
}

func answer(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(body)
}
