package trainer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"

	"github.com/capstan-gpu/capstan/trainer/stats"
)

// Reasons: how a read ended ([Result.Reads]), or why a sample was left out ([Result.Refused]).
const (
	ReasonOK        = "ok"
	ReasonTarget    = "target"    // the annotations ask for what is not allowed
	ReasonMoved     = "moved"     // the address is not, or not only, this pod's any more
	ReasonConnect   = "connect"   // nobody listens
	ReasonTimeout   = "timeout"   // not done in RequestTimeout
	ReasonHTTP      = "http"      // not HTTP, or too much header
	ReasonStatus    = "status"    // not 200
	ReasonRedirect  = "redirect"  // followed by nobody
	ReasonEncoding  = "encoding"  // compressed, though we asked for plain text
	ReasonSize      = "size"      // more than MaxBody
	ReasonLimits    = "limits"    // too many samples, lines, labels; names or values too long
	ReasonParse     = "parse"     // not the exposition format
	ReasonLabels    = "labels"    // a label that the family does not have, as a forged identity
	ReasonValue     = "value"     // not finite or out of range
	ReasonType      = "type"      // a histogram or summary where a number is wanted
	ReasonDuplicate = "duplicate" // the same series again
)

// refusal is an error with a reason.
type refusal struct {
	reason string
	err    error
}

func (r refusal) Error() string { return r.err.Error() }
func (r refusal) Unwrap() error { return r.err }

func refuse(reason, format string, args ...any) error {
	return refusal{reason, fmt.Errorf(format, args...)}
}

func reasonOf(err error) string {
	if err == nil {
		return ReasonOK
	}
	if r, ok := errors.AsType[refusal](err); ok {
		return r.reason
	}
	return ReasonHTTP
}

// client reads pages. Safe for concurrent use.
type client struct{ http *http.Client }

func newClient() *client {
	dialer := net.Dialer{Timeout: HeaderTimeout, KeepAlive: -1}
	return &client{&http.Client{
		Transport: &http.Transport{
			Proxy:                  nil,                // also not from the environment
			DialContext:            dialer.DialContext, // addresses are numbers: no name is looked up
			DisableCompression:     true,
			DisableKeepAlives:      true, // a connection that a stranger may keep open costs two goroutines
			MaxResponseHeaderBytes: MaxHeader,
			ResponseHeaderTimeout:  HeaderTimeout,
			ReadBufferSize:         4 << 10,
			WriteBufferSize:        1 << 10,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
}

// read fetches and checks one page.
func (c *client) read(ctx context.Context, t target, known map[string]*stats.Family) (samples []Sample, refused map[string]uint64, err error) {
	body, err := c.fetch(ctx, t)
	if err != nil {
		return nil, nil, err
	}
	return parse(body, known)
}

// fetch returns a page's bytes, at most MaxBody.
func (c *client) fetch(ctx context.Context, t target) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, RequestTimeout)
	defer cancel()
	address := url.URL{Scheme: "http", Host: t.address.String(), Path: t.path}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address.String(), nil)
	if err != nil {
		return nil, refuse(ReasonTarget, "read %s: %w", address.String(), err)
	}
	request.Header.Set("Accept", "text/plain;version=0.0.4")
	request.Header.Set("Accept-Encoding", "identity")
	request.Header.Set("User-Agent", "capstan-exporter")
	response, err := c.http.Do(request)
	if err != nil {
		return nil, refusal{transportReason(err), err}
	}
	defer response.Body.Close()
	switch encoding := response.Header.Get("Content-Encoding"); {
	case response.StatusCode >= 300 && response.StatusCode < 400:
		return nil, refuse(ReasonRedirect, "read %s: status %d, not followed", address.String(), response.StatusCode)
	case response.StatusCode != http.StatusOK:
		return nil, refuse(ReasonStatus, "read %s: status %d", address.String(), response.StatusCode)
	case encoding != "" && encoding != "identity":
		return nil, refuse(ReasonEncoding, "read %s: content encoding %.20q", address.String(), encoding)
	case response.ContentLength > stats.MaxBody:
		return nil, refuse(ReasonSize, "read %s: %d bytes, at most %d", address.String(), response.ContentLength, stats.MaxBody)
	}
	body, err := io.ReadAll(io.LimitReader(response.Body, stats.MaxBody+1))
	if err != nil {
		return nil, refusal{transportReason(err), fmt.Errorf("read %s: %w", address.String(), err)}
	}
	if len(body) > stats.MaxBody {
		return nil, refuse(ReasonSize, "read %s: more than %d bytes", address.String(), stats.MaxBody)
	}
	return body, nil
}

func transportReason(err error) string {
	if timeout, ok := errors.AsType[net.Error](err); ok && timeout.Timeout() || errors.Is(err, context.DeadlineExceeded) {
		return ReasonTimeout
	}
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "dial" {
		return ReasonConnect
	}
	return ReasonHTTP
}
