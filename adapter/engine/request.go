package engine

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"
	"unicode"
)

// Why a request brought no answer, as the label result says.
const (
	unreachable = "unreachable" // no connection
	untrusted   = "tls"         // no connection that both sides trust
	timeout     = "timeout"     // no complete answer in time
	refused     = "refused"     // 401, 403, or no token to show
	status      = "status"      // another status than 200
	redirected  = "redirect"    // to somewhere else
	tooLarge    = "too_large"   // more bytes than allowed
	malformed   = "malformed"   // no answer of the API
	partial     = "partial"     // of a part of the data
	rejected    = "query"       // the engine takes this query for wrong, or its outcome is not one for us
)

// failure is why a request brought no answer.
type failure struct {
	reason string // one of the constants
	err    error  // what came, and what to do
	final  bool   // every engine with the same data would fail alike
	down   bool   // any query would fail alike
}

func (f *failure) Error() string { return f.err.Error() }
func (f *failure) Unwrap() error { return f.err }

func fail(reason string, format string, args ...any) *failure {
	return &failure{reason: reason, err: fmt.Errorf(format, args...)}
}

// everywhere marks a failure as one that every engine would have.
func (f *failure) everywhere() *failure { f.final = true; return f }

// always marks a failure as one that every query would have.
func (f *failure) always() *failure { f.down = true; return f }

// form is the body of a query.
func (r *Remote) form(expr string, at time.Time, lookback time.Duration) url.Values {
	form := formOf(expr, at, lookback, r.cfg.Timeout)
	for name, value := range maps.All(r.cfg.Params) {
		form.Set(name, value)
	}
	return form
}

// formOf are the arguments that a query has for every engine. Durations are in seconds, which all of them read.
func formOf(expr string, at time.Time, lookback, timeout time.Duration) url.Values {
	seconds := func(d time.Duration) string {
		return strconv.FormatFloat(max(d, time.Millisecond).Seconds(), 'f', 3, 64)
	}
	return url.Values{
		"query":   {expr},
		"time":    {strconv.FormatFloat(float64(at.UnixMilli())/1000, 'f', 3, 64)},
		"timeout": {seconds(timeout)},

		"lookback_delta": {seconds(lookback)}, // Prometheus, Thanos, Mimir
		"max_lookback":   {seconds(lookback)}, // VictoriaMetrics
		"step":           {seconds(lookback)}, // likewise: how far its timestamp() looks back

		"dedup":                 {"true"},  // Thanos: series of replicated Prometheuses are one
		"partial_response":      {"false"}, // likewise: what not all stores answer is an error
		"max_source_resolution": {"0s"},    // likewise: no samples that were thinned out

		// VictoriaMetrics: it evaluates what is asked for now 30 s (-search.latencyOffset) earlier, or what it has in its cache.
		"nocache":               {"1"},
		"latency_offset":        {"1ms"}, // 0 is out of its bounds
		"deny_partial_response": {"1"},
	}
}

// ask sends a query to one engine.
func (r *Remote) ask(ctx context.Context, e endpoint, form url.Values, at time.Time) (answer, *failure) {
	limited, cancel := context.WithTimeout(ctx, r.cfg.Timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(limited, http.MethodPost, e.url.String(), strings.NewReader(form.Encode()))
	if err != nil {
		return answer{}, fail(unreachable, "make a request: %w", err).always()
	}
	for name, value := range r.cfg.Headers {
		req.Header.Set(name, value)
	}
	req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	req.Header.Set("Accept", "application/json")
	req.Header.Set("Accept-Encoding", "gzip")
	req.Header.Set("User-Agent", "capstan-adapter")
	req.Header["Idempotency-Key"] = nil // not sent: it lets a query be sent again on a connection that had been closed meanwhile
	if r.cfg.TokenFile != "" {
		token, err := readToken(r.cfg.TokenFile)
		if err != nil {
			return answer{}, fail(refused, "%w", err).always().everywhere()
		}
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := r.client.Do(req)
	if err != nil {
		return answer{}, r.unsent(ctx, err)
	}
	defer resp.Body.Close()
	body, f := r.read(ctx, resp)
	if f != nil {
		return answer{}, f
	}
	if f := judge(resp, body); f != nil {
		return answer{}, f
	}
	return decode(body, at)
}

// readToken reads what proves who we are. It may have been renewed since the last time.
func readToken(path string) (string, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("read the token file: %w: mount it, or set no token file", err)
	}
	token := strings.TrimSpace(string(data))
	if token == "" || strings.ContainsFunc(token, func(c rune) bool { return control(c) || c == ' ' || c > 0x7e }) {
		return "", fmt.Errorf("read the token file: %s is empty or no token: it must hold one line of printable characters without blanks", path)
	}
	return token, nil
}

// unsent is why there is no response.
func (r *Remote) unsent(ctx context.Context, err error) *failure {
	if wrapped, ok := errors.AsType[*url.Error](err); ok {
		err = wrapped.Err // the URL is told already
	}
	if f := r.late(ctx, err); f != nil {
		return f
	}
	_, verify := errors.AsType[*tls.CertificateVerificationError](err)
	_, alert := errors.AsType[tls.AlertError](err)
	_, record := errors.AsType[tls.RecordHeaderError](err)
	if verify || alert || record || errors.Is(err, http.ErrSchemeMismatch) || strings.Contains(err.Error(), "tls: ") {
		return fail(untrusted, "no trusted connection (%w): check the URL's scheme, the CA file, the server name, and the certificate that the engine asks for", err).always()
	}
	return fail(unreachable, "no connection (%w): check the URL, and that the engine runs and a NetworkPolicy lets the adapter reach it", err).always()
}

// late is the failure of a request that took too long; nil = err is of another kind.
func (r *Remote) late(ctx context.Context, err error) *failure {
	switch {
	case ctx.Err() != nil:
		return fail(timeout, "given up before it answered (%w): the tick's time is over", context.Cause(ctx)).everywhere()
	case errors.Is(err, context.DeadlineExceeded) || os.IsTimeout(err):
		return fail(timeout, "no complete answer within %s (%w): see why the engine is slow, or set a longer time-out", r.cfg.Timeout, context.DeadlineExceeded)
	}
	return nil
}

// read reads a body, as far as is allowed.
func (r *Remote) read(ctx context.Context, resp *http.Response) ([]byte, *failure) {
	cut := func(err error) *failure {
		if f := r.late(ctx, err); f != nil {
			return f
		}
		return fail(malformed, "its answer of status %s breaks off or cannot be unpacked (%w): see whether the engine or a proxy before it restarts, or bounds what it sends", resp.Status, err)
	}
	from := io.Reader(resp.Body)
	if strings.EqualFold(resp.Header.Get("Content-Encoding"), "gzip") {
		unpacked, err := gzip.NewReader(resp.Body)
		if err != nil {
			return nil, cut(err)
		}
		from = unpacked
	}
	var body bytes.Buffer
	n, err := body.ReadFrom(io.LimitReader(from, r.cfg.MaxBody+1))
	switch {
	case err != nil:
		return nil, cut(err)
	case n > r.cfg.MaxBody:
		return nil, fail(tooLarge, "its answer has more than %d bytes: set a higher bound, or let the rule select less", r.cfg.MaxBody).everywhere()
	}
	return body.Bytes(), nil
}

// judge says why a response cannot be an answer; nil = it can.
func judge(resp *http.Response, body []byte) *failure {
	code := resp.StatusCode
	if code == http.StatusOK {
		if html(resp, body) {
			return fail(malformed, "answers with a web page (%s): the URL is not that of the API, or a proxy asks people to log in: set the API's URL with its path prefix, or a token file", excerpt(body)).always()
		}
		return nil
	}
	said := excerpt(body)
	kind, text := apiError(body)
	if kind != "" {
		said = kind + ": " + clean(text)
	}
	switch {
	case code >= 300 && code < 400:
		return fail(redirected, "redirects to %s, where no token must go: set the URL to where it leads, or a token file if that is a log-in", target(resp)).always()
	case strings.Contains(said, "no org id"):
		return fail(refused, "answers %s (%s): it wants to know the tenant: set the header X-Scope-OrgID", resp.Status, said).always()
	case code == http.StatusUnauthorized || code == http.StatusForbidden:
		return fail(refused, "answers %s (%s): set a token file or certificate that it takes, with the right to query", resp.Status, said).always()
	case code == http.StatusNotFound || code == http.StatusMethodNotAllowed:
		return fail(status, "answers %s (%s): there is no query API at this path: set the URL with its prefix, such as /prometheus of Mimir or /select/0/prometheus of a VictoriaMetrics cluster", resp.Status, said).always()
	case code == http.StatusTooManyRequests:
		return fail(status, "answers %s (%s): raise the tenant's limits, or tick less often", resp.Status, said).always()
	case kind == "timeout" || kind == "canceled" || code == http.StatusGatewayTimeout:
		return fail(timeout, "answers %s (%s): see why the engine is slow, or set longer time-outs on both sides", resp.Status, said)
	case (code == http.StatusBadRequest || code == http.StatusUnprocessableEntity) && kind != "":
		return fail(rejected, "cannot evaluate it, %s (%s): mend the rule, or the data that it stumbles over", resp.Status, said).everywhere()
	case kind != "":
		return fail(status, "answers %s (%s): see the engine's log", resp.Status, said)
	}
	return fail(status, "answers %s (%s): see whether the engine runs, and the proxies before it", resp.Status, said).always()
}

// html says whether this is a page for people.
func html(resp *http.Response, body []byte) bool {
	return strings.HasPrefix(resp.Header.Get("Content-Type"), "text/html") || bytes.HasPrefix(bytes.TrimSpace(body), []byte("<"))
}

// target is where a redirect leads, without arguments: they may hold secrets.
func target(resp *http.Response) string {
	u, err := resp.Location()
	if err != nil {
		return "nowhere"
	}
	return clean(u.Scheme + "://" + u.Host + u.EscapedPath())
}

// excerpt is the beginning of a body that is no answer.
func excerpt(body []byte) string {
	if len(bytes.TrimSpace(body)) == 0 {
		return "nothing more"
	}
	return clean(string(body[:min(len(body), 1024)]))
}

// clean makes another's words fit for a log line: one line, printable, short.
func clean(text string) string {
	const most = 240
	words := strings.Join(strings.FieldsFunc(strings.ToValidUTF8(text, "?"), func(c rune) bool { return unicode.IsSpace(c) || !unicode.IsPrint(c) }), " ")
	if runes := []rune(words); len(runes) > most {
		words = string(runes[:most]) + "…"
	}
	return words
}
