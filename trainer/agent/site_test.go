package agent

import (
	"bytes"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	k8stesting "k8s.io/client-go/testing"

	"github.com/capstan-gpu/capstan/trainer/ring"
)

// A worker without an API server knows its place by its name.
func TestSiteFixed(t *testing.T) {
	file := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(file, []byte("  0123456789abcdef\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	l := listen(t)
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	good := SiteConfig{Namespace: "ml", Pod: "my-training-3", PodIP: "10.0.0.3", PodUID: "u3", FirstOrdinal: 2, Service: "workers", SecretFile: file, Listener: l, Logger: slog.New(slog.DiscardHandler)}
	s, err := FindSite(t.Context(), good)
	if err != nil {
		t.Fatal(err)
	}
	id := s.Self.ID
	if s.Job != "ml/my-training" || id.Ordinal != 3 || id.Pod != "u3" || id.Boot < 1 || s.Self.Address != "10.0.0.3:"+port || s.Self.Key == "" || s.Grace != 30*time.Second {
		t.Errorf("the place is %+v", s)
	}
	if got, want := s.Cluster.(*Fixed).address, "my-training-2.workers.ml.svc:"+port; got != want {
		t.Errorf("the first ordinal is looked for at %s, want %s", got, want)
	}
	cfg := s.Config(ring.Config{Min: 2}, &listTrainer{}).Ring
	if cfg.Job != s.Job || !cfg.FixedCoordinator || cfg.FirstOrdinal != 2 || cfg.Min != 2 {
		t.Errorf("the ring is %+v", cfg)
	}
	for _, c := range []struct {
		change func(*SiteConfig)
		want   string
	}{
		{func(c *SiteConfig) { c.Pod = "training" }, `pod "training": want a name like training-3`},
		{func(c *SiteConfig) { c.Pod = "-3" }, `pod "-3": want a name like training-3`},
		{func(c *SiteConfig) { c.SecretFile = "" }, "nothing would keep strangers out"},
		{func(c *SiteConfig) { c.SecretFile = "/none" }, "read the secret: open /none"},
		{func(c *SiteConfig) { c.Namespace = "" }, "no namespace"},
	} {
		bad := good
		c.change(&bad)
		_, err := FindSite(t.Context(), bad)
		if h, ok := errors.AsType[Hint](err); !ok || !strings.Contains(err.Error(), c.want) || h.Fix == "" {
			t.Errorf("%v, want %q and what to do", err, c.want)
		}
	}
}

// In a cluster the pod says it all; an API server that is away is asked again, and a right that is lacking is named.
func TestSiteKubernetes(t *testing.T) {
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	l := listen(t)
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	api := versioned(statefulSet(), pod("training-4", "u4", "job-1", func(p *corev1.Pod) { p.Status.PodIP = "10.0.0.4" }))
	away := 1
	api.PrependReactor("get", "pods", func(k8stesting.Action) (bool, runtime.Object, error) {
		away--
		return away >= 0, nil, errors.New("connection refused")
	})
	var log bytes.Buffer
	cfg := SiteConfig{API: api, Namespace: "ml", Pod: "training-4", TokenFile: token, Listener: l, Logger: slog.New(slog.NewTextHandler(&log, nil)), Grace: 20 * time.Second}
	s, err := FindSite(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if s.Job != "job-1" || s.Self.ID.Ordinal != 4 || s.Self.ID.Pod != "u4" || s.Self.Address != "10.0.0.4:"+port || s.FirstOrdinal != 2 || s.Revision != "training-5d9" || s.Grace != 20*time.Second || s.Fixed {
		t.Errorf("the place is %+v", s)
	}
	for _, want := range []string{"connection refused", "grace=20s terminationGracePeriodSeconds=90"} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("the log says %q, want %q", log.String(), want)
		}
	}
	if got := s.Config(ring.Config{}, &listTrainer{}).Ring.Version; got != "training-5d9" {
		t.Errorf("the version is %q, want the template's revision", got)
	}
	cfg.TokenFile = "/none"
	if _, err := FindSite(t.Context(), cfg); err == nil || !strings.Contains(err.(Hint).Fix, "audience capstan.dev/ml/training") {
		t.Errorf("no token: %v", err)
	}
	api.PrependReactor("get", "statefulsets", func(k8stesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: "statefulsets"}, "training", errors.New("no"))
	})
	if _, err := FindSite(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), "statefulsets") || !strings.Contains(err.(Hint).Fix, "Role") {
		t.Errorf("no right: %v", err)
	}
}
