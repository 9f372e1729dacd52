package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"time"
)

// controller asks as the HPA controller does, through the front proxy: every HPA once in 15 s, five at a time.
type controller struct {
	kube *cluster
	base string

	mu       sync.Mutex // protects all following fields
	get      *http.Client
	took     []time.Duration
	failures int
	example  string // of a failure
}

func newController(kube *cluster, port int) *controller {
	return &controller{kube: kube, base: fmt.Sprintf("https://127.0.0.1:%d", port)}
}

// client trusts the caBundle that the adapter has filled in, as the API server does.
func (c *controller) client() (*http.Client, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.get == nil {
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(c.kube.caBundle()) {
			return nil, errors.New("no caBundle yet")
		}
		c.get = &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{
			ForceAttemptHTTP2: true, MaxIdleConnsPerHost: 5,
			TLSClientConfig: &tls.Config{RootCAs: pool, ServerName: "capstan-adapter.capstan-system.svc", Certificates: []tls.Certificate{c.kube.Proxy}}}}
	}
	return c.get, nil
}

func (c *controller) run(ctx context.Context) {
	work := make(chan int)
	for range 5 {
		go func() {
			for i := range work {
				c.ask(ctx, i)
			}
		}()
	}
	ticker := time.NewTicker(15 * time.Second / sets)
	defer ticker.Stop()
	defer close(work)
	for i := 0; ; i++ {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			work <- i % sets
		}
	}
}

func (c *controller) ask(ctx context.Context, set int) {
	u := c.base + "/apis/external.metrics.k8s.io/v1beta1/namespaces/" + namespaceOf(set) + "/gpu_utilization?labelSelector=" + url.QueryEscape("workload="+setName(set))
	begin := time.Now()
	code, body, err := c.fetch(ctx, u, "system:serviceaccount:kube-system:horizontal-pod-autoscaler")
	took := time.Since(begin)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.took = append(c.took, took)
	if err != nil || code != 200 {
		c.failures++
		c.example = fmt.Sprintf("%s: %d %v %.300s", u, code, err, body)
		if c.get != nil {
			c.get.CloseIdleConnections() // the adapter may not have known the front proxy when this one was made
		}
	}
}

func (c *controller) fetch(ctx context.Context, u, user string) (int, string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u, nil)
	if err != nil {
		return 0, "", err
	}
	req.Header.Set("X-Remote-User", user)
	req.Header.Set("Accept", "application/vnd.kubernetes.protobuf, */*")
	client, err := c.client()
	if err != nil {
		return 0, "", err
	}
	resp, err := client.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(body), err
}

func (c *controller) reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.took, c.failures, c.example = nil, 0, ""
}

// result is how long requests took since reset, sorted.
func (c *controller) result() (took []time.Duration, failures int, example string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	took = slices.Clone(c.took)
	slices.Sort(took)
	return took, c.failures, c.example
}

var stage = regexp.MustCompile(`(?m)^capstan_adapter_tick_duration_seconds_(sum|count)\{stage="(\w+)"\} (\S+)$`)

// metrics is the adapter's own page.
func (c *controller) metrics(ctx context.Context) (string, error) {
	code, body, err := c.fetch(ctx, c.base+"/metrics", "prometheus")
	if err != nil || code != 200 {
		return "", fmt.Errorf("read the adapter's metrics: %d %v", code, err)
	}
	return body, nil
}

// stages are the mean durations of a tick's stages in milliseconds, from that page.
func stages(page string) map[string]float64 {
	out := map[string]float64{}
	for _, m := range stage.FindAllStringSubmatch(page, -1) {
		v, err := strconv.ParseFloat(m[3], 64)
		if err != nil {
			continue
		}
		if m[1] == "sum" {
			out[m[2]] = v * 1000
		} else {
			out[m[2]] /= v
		}
	}
	return out
}
