package engine

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// RemoteConfig is the configuration of a [Remote]. Validate says what is wrong with it.
type RemoteConfig struct {
	// URLs of the API without /api/v1/query, such as https://mimir.example/prometheus: one, or several that hold the same data. The first
	// is asked until it fails, then the next until that fails.
	URLs []string

	CAFile            string // PEM of who may have signed the engine's certificate; "" = the system's
	CertFile, KeyFile string // PEM of what is shown to the engine; "" = nothing is
	ServerName        string // that the engine's certificate must be for; "" = the URL's host
	TokenFile         string // a bearer token, read anew for every request; "" = none is sent

	Headers map[string]string // of every request, such as X-Scope-OrgID: the tenant of Mimir
	Params  map[string]string // more arguments of every query, such as extra_label=cluster=a of VictoriaMetrics

	Timeout     time.Duration // of one request; 0 = 2 s
	Concurrency int           // requests in flight at once; 0 = 4
	MaxBody     int64         // bytes of an answer, after decompression; 0 = 32 MiB

	Annotated  func(expr string, notes []string) // called with what the engine remarks about a query, and what is odd in its answer; nil = ignored
	Transport  http.RoundTripper                 // instead of one by the files of TLS; nil = by them
	Registerer prometheus.Registerer             // nil = not registered
	Logger     *slog.Logger                      // nil = slog.Default()
}

// Validate says which field is wrong, with its value, its bound and what to do. Files are not opened.
func (c RemoteConfig) Validate() error {
	var errs []error
	wrong := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if len(c.URLs) == 0 {
		wrong("there is no engine URL: set one, such as http://prometheus.monitoring:9090")
	}
	seen := map[string]bool{}
	for _, text := range c.URLs {
		e, err := newEndpoint(text)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		if seen[e.name] {
			wrong("engine URL %s is there twice: it cannot stand in for itself, leave one out", e.name)
		}
		seen[e.name] = true
		if c.TokenFile != "" && e.url.Scheme == "http" && !loopback(e.url.Hostname()) {
			wrong("engine URL %s with a token file: by http everybody on the way can read the token: use https, or no token", e.name)
		}
		if c.CertFile != "" && e.url.Scheme == "http" {
			wrong("engine URL %s with a certificate file: by http no certificate is shown: use https, or no certificate", e.name)
		}
	}
	if (c.CertFile == "") != (c.KeyFile == "") {
		wrong("engine certificate file %q with key file %q: both are needed, or none", c.CertFile, c.KeyFile)
	}
	for _, name := range slices.Sorted(maps.Keys(c.Headers)) {
		value := c.Headers[name]
		switch key := http.CanonicalHeaderKey(name); {
		case !token(name):
			wrong("engine header %q: that is no name of a header: use letters, digits and -", name)
		case key == "Authorization":
			wrong("engine header Authorization: what everybody can read in the configuration is no secret: use the token file")
		case slices.Contains(ownHeaders, key):
			wrong("engine header %s is the adapter's own: leave it out", key)
		case value == "" || strings.ContainsFunc(value, control):
			wrong("engine header %s: its value is empty or has control characters: set a plain one, or leave it out", key)
		}
	}
	own := formOf("", time.Time{}, time.Second, time.Second)
	for _, name := range slices.Sorted(maps.Keys(c.Params)) {
		if name == "" || own.Has(name) {
			wrong("engine argument %q is the adapter's own: leave it out", name)
		}
	}
	if c.Timeout != 0 && (c.Timeout < 100*time.Millisecond || c.Timeout > time.Minute) {
		wrong("engine time-out is %s: it must be from 100ms to 1m", c.Timeout)
	}
	if c.Concurrency != 0 && (c.Concurrency < 1 || c.Concurrency > 64) {
		wrong("engine concurrency is %d: it must be from 1 to 64", c.Concurrency)
	}
	if c.MaxBody != 0 && (c.MaxBody < 64<<10 || c.MaxBody > 1<<30) {
		wrong("engine answers may have %d bytes: it must be from 65536 to 1073741824", c.MaxBody)
	}
	return errors.Join(errs...)
}

// ownHeaders are those that make the exchange work.
var ownHeaders = []string{"Accept", "Accept-Encoding", "Connection", "Content-Encoding", "Content-Length", "Content-Type", "Host", "Idempotency-Key", "Transfer-Encoding", "User-Agent"}

// endpoint is one engine.
type endpoint struct {
	url  *url.URL // of /api/v1/query
	name string   // the URL as it was given: it holds no secret
}

// newEndpoint reads an engine's URL.
func newEndpoint(text string) (endpoint, error) {
	u, err := url.Parse(text)
	if err != nil {
		return endpoint{}, errors.New("an engine URL is none: write one, such as http://prometheus.monitoring:9090") // err quotes it, with its password
	}
	name := u.Scheme + "://" + u.Host + strings.TrimRight(u.EscapedPath(), "/")
	switch {
	case u.User != nil:
		return endpoint{}, fmt.Errorf("engine URL %s has a user name or password in it: take it out, and use the token file or a certificate", name)
	case u.Scheme != "http" && u.Scheme != "https":
		return endpoint{}, fmt.Errorf("engine URL %q begins with %q: it must begin with http:// or https://", name, u.Scheme)
	case u.Hostname() == "":
		return endpoint{}, fmt.Errorf("engine URL %q names no host: write one, such as http://prometheus.monitoring:9090", name)
	case u.RawQuery != "" || u.Fragment != "":
		return endpoint{}, fmt.Errorf("engine URL %s has arguments after ? or #: set them as arguments of the query", name)
	case strings.HasSuffix(name, "/api/v1/query"), strings.HasSuffix(name, "/api/v1"):
		return endpoint{}, fmt.Errorf("engine URL %s: the adapter itself appends /api/v1/query: leave off /api/v1 and what follows", name)
	}
	return endpoint{u.JoinPath("api", "v1", "query"), name}, nil
}

func loopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// token says whether it may be the name of a header.
func token(name string) bool {
	return name != "" && !strings.ContainsFunc(name, func(c rune) bool {
		return (c < '0' || c > '9') && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && c != '-' && c != '_'
	})
}

func control(c rune) bool { return c < ' ' || c == 0x7f }
