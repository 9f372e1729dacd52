package engine

import (
	"strings"
	"testing"
	"time"
)

func TestRemoteConfig(t *testing.T) {
	good := RemoteConfig{URLs: []string{"https://mimir.example/prometheus", "http://127.0.0.1:9090", "http://[::1]:9090/"}, TokenFile: "t", Headers: map[string]string{"X-Scope-OrgID": "a|b"}, Params: map[string]string{"extra_label": "a=b"}, Timeout: time.Second, Concurrency: 2, MaxBody: 1 << 20}
	if err := good.Validate(); err != nil {
		t.Error(err)
	}
	for _, c := range []struct {
		change func(*RemoteConfig)
		want   string
	}{
		{func(c *RemoteConfig) { c.URLs = nil }, "there is no engine URL"},
		{func(c *RemoteConfig) { c.URLs = []string{"https://u:SECRET@prometheus"} }, "https://prometheus has a user name or password"},
		{func(c *RemoteConfig) { c.URLs = []string{"https://u:SECRET%@prometheus"} }, "an engine URL is none"},
		{func(c *RemoteConfig) { c.URLs = []string{"ftp://prometheus"} }, `begins with "ftp"`},
		{func(c *RemoteConfig) { c.URLs = []string{"prometheus:9090"} }, `begins with "prometheus"`},
		{func(c *RemoteConfig) { c.URLs = []string{"https://"} }, "names no host"},
		{func(c *RemoteConfig) { c.URLs = []string{"https://prometheus/?token=SECRET"} }, "arguments after ? or #"},
		{func(c *RemoteConfig) { c.URLs = []string{"https://prometheus/api/v1"} }, "leave off /api/v1"},
		{func(c *RemoteConfig) { c.URLs = []string{"https://a/", "https://a"} }, "is there twice"},
		{func(c *RemoteConfig) { c.URLs = []string{"http://prometheus:9090"} }, "everybody on the way can read the token"},
		{func(c *RemoteConfig) { c.URLs, c.TokenFile, c.CertFile, c.KeyFile = []string{"http://a"}, "", "c", "k" }, "by http no certificate is shown"},
		{func(c *RemoteConfig) { c.URLs, c.CertFile = []string{"https://a"}, "c" }, "both are needed"},
		{func(c *RemoteConfig) { c.Headers = map[string]string{"X Y": "1"} }, "no name of a header"},
		{func(c *RemoteConfig) { c.Headers = map[string]string{"authorization": "Basic SECRET"} }, "use the token file"},
		{func(c *RemoteConfig) { c.Headers = map[string]string{"host": "x"} }, "Host is the adapter's own"},
		{func(c *RemoteConfig) { c.Headers = map[string]string{"x": "SECRET\r\ny: z"} }, "header X: its value"},
		{func(c *RemoteConfig) { c.Params = map[string]string{"time": "0"} }, `argument "time"`},
		{func(c *RemoteConfig) { c.Timeout = time.Hour }, "time-out is 1h0m0s: it must be from 100ms to 1m"},
		{func(c *RemoteConfig) { c.Concurrency = -1 }, "concurrency is -1: it must be from 1 to 64"},
		{func(c *RemoteConfig) { c.MaxBody = 1 }, "1 bytes: it must be from 65536"},
	} {
		cfg := good
		c.change(&cfg)
		err := cfg.Validate()
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") || strings.Contains(err.Error(), "SECRET") {
			t.Errorf("%v; want %s alone", err, c.want)
		}
		if _, other := NewRemote(cfg); other == nil {
			t.Errorf("%s: NewRemote takes it", c.want)
		}
	}
}
