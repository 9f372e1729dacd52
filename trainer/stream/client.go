package stream

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// Client speaks to a [Source]. Safe for concurrent use.
type Client struct {
	url  string
	http *http.Client
}

// NewClient returns a client for the source at an address like http://mnist-training-source:8080. transport nil = plain TCP.
func NewClient(address string, transport http.RoundTripper) (*Client, error) {
	u, err := url.Parse(address)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return nil, fmt.Errorf("source %q: want an address like http://mnist-training-source:8080", address)
	}
	if transport == nil {
		t := http.DefaultTransport.(*http.Transport).Clone()
		t.Proxy = nil
		t.MaxIdleConnsPerHost = 4
		transport = t
	}
	return &Client{strings.TrimRight(address, "/"), &http.Client{Transport: transport, Timeout: pullWait + 5*time.Second}}, nil
}

// Pull asks for at most max samples for a worker, and waits up to ten seconds for them. ok is false when there were none.
func (c *Client) Pull(ctx context.Context, worker string, max int64) (work Work, ok bool, err error) {
	status, err := c.do(ctx, http.MethodPost, "/pull", pullRequest{worker, max}, &work)
	if err != nil {
		return Work{}, false, fmt.Errorf("pull samples: %w", err)
	}
	return work, status == http.StatusOK, nil
}

// Done settles a lease: its first n samples are completed, the rest goes back. It may be said again after an error. [ErrLate]
// when the lease is another's by now.
func (c *Client) Done(ctx context.Context, worker, lease string, n int64) error {
	status, err := c.do(ctx, http.MethodPost, "/done", doneRequest{worker, lease, n}, nil)
	if status == http.StatusConflict {
		return ErrLate
	}
	if err != nil {
		return fmt.Errorf("settle lease %s: %w", lease, err)
	}
	return nil
}

// Status reads the account.
func (c *Client) Status(ctx context.Context) (Status, error) {
	var s Status
	if _, err := c.do(ctx, http.MethodGet, "/status", nil, &s); err != nil {
		return Status{}, fmt.Errorf("read the source's status: %w", err)
	}
	return s, nil
}

// SetRate changes the rate, in samples/s.
func (c *Client) SetRate(ctx context.Context, rate float64) error {
	if _, err := c.do(ctx, http.MethodPut, "/rate", rateRequest{&rate}, nil); err != nil {
		return fmt.Errorf("set the source's rate to %g: %w", rate, err)
	}
	return nil
}

func (c *Client) do(ctx context.Context, method, path string, body, into any) (status int, err error) {
	var content io.Reader
	if body != nil {
		encoded, err := json.Marshal(body)
		if err != nil {
			return 0, err
		}
		content = bytes.NewReader(encoded)
	}
	request, err := http.NewRequestWithContext(ctx, method, c.url+path, content)
	if err != nil {
		return 0, err
	}
	response, err := c.http.Do(request)
	if err != nil {
		return 0, err
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(response.Body, 1<<20))
	if err != nil {
		return 0, err
	}
	if response.StatusCode >= 300 {
		var problem struct {
			Error string `json:"error"`
		}
		if json.Unmarshal(answer, &problem) != nil || problem.Error == "" {
			problem.Error = response.Status
		}
		return response.StatusCode, fmt.Errorf("the source says: %s", problem.Error)
	}
	if into != nil && response.StatusCode == http.StatusOK {
		if err := json.Unmarshal(answer, into); err != nil {
			return response.StatusCode, fmt.Errorf("decode the source's answer: %w", err)
		}
	}
	return response.StatusCode, nil
}
