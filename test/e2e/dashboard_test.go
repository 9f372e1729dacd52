package e2e

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/capstan-gpu/capstan/dashboards/board"
	"github.com/capstan-gpu/capstan/dashboards/check"
	"github.com/capstan-gpu/capstan/test/rig"
)

// record scrapes the exporters and the adapter every few seconds, as a Prometheus would, until stop is called.
func (s *scene) record() (stop func() []check.Page) {
	s.Helper()
	scrapeAdapter := s.adapterPage()
	ctx, cancel := context.WithCancel(s.ctx)
	var (
		wait  sync.WaitGroup
		pages []check.Page
	)
	nodes := s.nodes()
	wait.Go(func() {
		for ctx.Err() == nil {
			for _, node := range nodes {
				pod, err := cluster.PodOn(ctx, rig.NodeNamespace, "app.kubernetes.io/name=capstan-exporter", node)
				if err != nil {
					continue
				}
				if text, err := cluster.ExporterPage(ctx, pod.Name, "/metrics"); err == nil {
					pages = append(pages, check.Page{At: time.Now(), Text: text, Node: node})
				}
			}
			if text, err := scrapeAdapter(ctx); err == nil {
				pages = append(pages, check.Page{At: time.Now(), Text: text})
			}
			select {
			case <-ctx.Done():
			case <-time.After(4 * time.Second):
			}
		}
	})
	return func() []check.Page {
		cancel()
		wait.Wait()
		return pages
	}
}

// adapterPage returns a function that reads the adapter's own metrics with a token that may: they are behind authorization.
func (s *scene) adapterPage() func(context.Context) (string, error) {
	s.Helper()
	role := s.ns + "-metrics"
	for _, args := range [][]string{
		{"-n", s.ns, "create", "serviceaccount", "prometheus"},
		{"create", "clusterrole", role, "--verb=get", "--non-resource-url=/metrics"},
		{"create", "clusterrolebinding", role, "--clusterrole=" + role, "--serviceaccount=" + s.ns + ":prometheus"},
	} {
		_, err := cluster.Kubectl(s.ctx, args...)
		s.must(err)
	}
	s.Cleanup(func() {
		if _, err := cluster.Kubectl(context.Background(), "delete", "clusterrole,clusterrolebinding", role); err != nil {
			s.Error(err)
		}
	})
	token, err := cluster.Kubectl(s.ctx, "-n", s.ns, "create", "token", "prometheus")
	s.must(err)
	address := s.forward(rig.SystemNamespace, "deployment/capstan-adapter", "6443")
	client := &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}} // the forward has another name than the certificate
	return func(ctx context.Context) (string, error) {
		request, err := http.NewRequestWithContext(ctx, "GET", "https://"+address+"/metrics", nil)
		if err != nil {
			return "", err
		}
		request.Header.Set("Authorization", "Bearer "+strings.TrimSpace(token))
		response, err := client.Do(request)
		if err != nil {
			return "", err
		}
		defer response.Body.Close()
		body, err := io.ReadAll(response.Body)
		if err == nil && response.StatusCode != http.StatusOK {
			err = fmt.Errorf("the adapter's /metrics answers %s: %s", response.Status, body)
		}
		return string(body), err
	}
}

// dashboards evaluates every query of every dashboard on what was recorded. kube-state-metrics is not on this cluster.
func (s *scene) dashboards(pages []check.Page, namespace, workload string) {
	s.Helper()
	if len(pages) < 10 {
		s.Errorf("only %d pages were recorded", len(pages))
		return
	}
	samples, err := check.Samples(pages)
	s.must(err)
	from, to := pages[0].At.Add(30*time.Second), pages[len(pages)-1].At
	for _, name := range board.Names() {
		d, err := board.Build(name)
		s.must(err)
		for _, problem := range check.Evaluate(s.ctx, d, samples, from, to, map[string]string{"namespace": namespace, "workload": workload}, "kube_") {
			s.Errorf("dashboard %s, on %d pages of %s: %s", name, len(pages), to.Sub(from).Round(time.Second), problem)
		}
	}
}
