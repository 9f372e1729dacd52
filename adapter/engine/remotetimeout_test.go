package engine

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// RoundTripFunc is a function as a transport, for the tests of package engine_test, too.
type RoundTripFunc func(*http.Request) (*http.Response, error)

// RoundTrip implements [http.RoundTripper].
func (f RoundTripFunc) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// hung never answers before its context is done.
func hung(r *http.Request) (*http.Response, error) {
	<-r.Context().Done()
	return nil, r.Context().Err()
}

func TestTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		answers := false
		r := remote(t, RemoteConfig{URLs: []string{"http://a", "http://b"}, Timeout: 2 * time.Second, Transport: RoundTripFunc(func(r *http.Request) (*http.Response, error) {
			if r.URL.Host == "a" || !answers {
				return hung(r)
			}
			return &http.Response{StatusCode: 200, Header: http.Header{}, Body: io.NopCloser(strings.NewReader(vectorOf(noon, "2")))}, nil
		})})
		begin := time.Now()
		ask := func(ctx context.Context) (time.Duration, error) {
			begin = time.Now()
			_, err := r.Func(time.Second)(ctx, "q", noon)
			return time.Since(begin), err
		}
		took, err := ask(t.Context())
		if took != 4*time.Second || !errors.Is(err, context.DeadlineExceeded) || strings.Count(err.Error(), "no complete answer within 2s") != 2 {
			t.Errorf("both hang: %s, %v", took, err)
		}
		// A tick's deadline ends it before, and no other engine is asked then.
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if took, err = ask(ctx); took != time.Second || !errors.Is(err, context.DeadlineExceeded) || strings.Contains(err.Error(), "http://b") {
			t.Errorf("a deadline before: %s, %v", took, err)
		}
		answers = true
		if took, err = ask(t.Context()); took != 2*time.Second || err != nil {
			t.Errorf("one hangs: %s, %v", took, err)
		}
		if took, err = ask(t.Context()); took != 0 || err != nil {
			t.Errorf("it is not asked first again: %s, %v", took, err)
		}
	})
}

// A body that stops in the middle is late, too.
func TestSlowBody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := remote(t, RemoteConfig{URLs: []string{"http://a"}, Transport: RoundTripFunc(func(r *http.Request) (*http.Response, error) {
			body, writer := io.Pipe()
			context.AfterFunc(r.Context(), func() { writer.CloseWithError(r.Context().Err()) })
			return &http.Response{StatusCode: 200, Header: http.Header{}, Body: body}, nil
		})})
		if _, err := r.Func(time.Second)(t.Context(), "q", noon); err == nil || !strings.Contains(err.Error(), "no complete answer within 2s") {
			t.Error(err)
		}
	})
}

func TestConcurrencyIsLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var now, most atomic.Int32
		r := remote(t, RemoteConfig{URLs: []string{"http://a"}, Concurrency: 3, Transport: RoundTripFunc(func(r *http.Request) (*http.Response, error) {
			most.Store(max(most.Load(), now.Add(1)))
			defer now.Add(-1)
			select {
			case <-time.After(time.Second):
			case <-r.Context().Done():
				return nil, r.Context().Err()
			}
			return &http.Response{StatusCode: 200, Header: http.Header{}, Body: io.NopCloser(strings.NewReader(vectorOf(noon, "2")))}, nil
		})})
		ctx, cancel := context.WithTimeout(t.Context(), 3500*time.Millisecond)
		defer cancel()
		results := make(chan error)
		for range 12 {
			go func() {
				_, err := r.Func(time.Second)(ctx, "q", noon)
				results <- err
			}()
		}
		good := 0
		var last error
		for range 12 {
			if err := <-results; err == nil {
				good++
			} else {
				last = err
			}
		}
		// The fourth three were in flight when the tick's time was over.
		if good != 9 || most.Load() != 3 || !errors.Is(last, context.DeadlineExceeded) {
			t.Errorf("%d answers, %d at once, %v; want 9 and 3", good, most.Load(), last)
		}
	})
}
