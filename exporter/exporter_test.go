package exporter

import (
	"compress/gzip"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/capstan-gpu/capstan/exporter/gpu"
	"github.com/capstan-gpu/capstan/exporter/podmap"
	"github.com/capstan-gpu/capstan/exporter/trainer"
	"github.com/capstan-gpu/capstan/metricname"
)

var discard = slog.New(slog.DiscardHandler)

// fakeReader is a driver: what it says, and how long it takes.
type fakeReader struct {
	reads  atomic.Int64
	closed atomic.Bool
	inside atomic.Int64 // calls under way; two at once would be wrong
	read   func(n int64, now time.Time) gpu.Reading
}

func (f *fakeReader) Read(now time.Time) gpu.Reading {
	if f.inside.Add(1) != 1 || f.closed.Load() {
		panic("two users of one driver, or a closed one")
	}
	defer f.inside.Add(-1)
	return f.read(f.reads.Add(1), now)
}

func (f *fakeReader) Close() error {
	if f.closed.Swap(true) {
		panic("closed twice")
	}
	return nil
}

// steady is a driver with one GPU that is half busy.
func steady(n int64, now time.Time) gpu.Reading {
	return gpu.Reading{At: now, Devices: []gpu.Device{device("GPU-1", float64(n)/2, float64(n))}}
}

func config(r Reader) Config {
	return Config{Listen: "127.0.0.1:0", Interval: time.Second, KubeletDir: "/nowhere", MappingInterval: time.Second, MappingMaxAge: 30 * time.Second,
		StatsInterval: 5 * time.Second, StuckAfter: time.Minute, GPU: r, Registry: prometheus.NewPedanticRegistry(), Logger: discard}
}

// start runs an exporter on a free port, and returns what asks it and what ends it.
func start(t *testing.T, cfg Config) (get func(path string) (int, string), stop func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	where := make(chan net.Addr, 1)
	cfg.OnListen = func(a net.Addr) { where <- a }
	done := make(chan error, 1)
	go func() { done <- Run(ctx, cfg) }()
	var address net.Addr
	select {
	case address = <-where:
	case err := <-done:
		t.Fatalf("Run: %v", err)
	}
	stop = sync.OnceValue(func() error { cancel(); return <-done })
	t.Cleanup(func() { stop() })
	return func(path string) (int, string) {
		t.Helper()
		response, err := http.Get("http://" + address.String() + path)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		body, err := io.ReadAll(response.Body)
		if err != nil {
			t.Fatal(err)
		}
		return response.StatusCode, string(body)
	}, stop
}

// until asks until the answer has the words.
func until(t *testing.T, get func(string) (int, string), path string, words ...string) string {
	t.Helper()
	var body string
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		_, body = get(path)
		missing := false
		for _, w := range words {
			missing = missing || !strings.Contains(body, w)
		}
		if !missing {
			return body
		}
	}
	t.Fatalf("%s never said %q, but\n%s", path, words, body)
	return ""
}

func TestRun(t *testing.T) {
	driver := &fakeReader{read: steady}
	cfg := config(driver)
	cfg.Interval = 100 * time.Millisecond
	get, stop := start(t, cfg)
	until(t, get, "/metrics", metricname.GPUBusySeconds+`{uuid="GPU-1"} `, metricname.LibraryUp+" 1")
	if code, body := get("/livez"); code != 200 {
		t.Errorf("/livez %d %s", code, body)
	}
	// No kubelet here: ready all the same, and it says so.
	until(t, get, "/readyz", "ready, but", "pod-resources does not answer", "Pods API")
	if code, _ := get("/readyz"); code != 200 {
		t.Errorf("/readyz %d", code)
	}
	if code, body := get("/"); code != 200 || !strings.Contains(body, "/metrics") {
		t.Errorf("/ %d %s", code, body)
	}
	if code, _ := get("/nowhere"); code != 404 {
		t.Errorf("/nowhere %d", code)
	}
	if err := stop(); err != nil {
		t.Errorf("Run: %v", err)
	}
	if !driver.closed.Load() {
		t.Error("the driver is still open")
	}
}

// A driver that does not come back: the page is served with a growing age, /livez says no, and the end is not delayed for long.
func TestStuckDriver(t *testing.T) {
	release := make(chan struct{})
	defer close(release)
	driver := &fakeReader{read: func(n int64, now time.Time) gpu.Reading {
		if n == 3 {
			<-release
		}
		return steady(n, now)
	}}
	cfg := config(driver)
	cfg.Interval, cfg.StuckAfter = 100*time.Millisecond, 500*time.Millisecond
	get, stop := start(t, cfg)
	until(t, get, "/livez", "stuck: a reading of the GPUs began")
	if code, _ := get("/livez"); code != 503 {
		t.Errorf("/livez %d, want 503", code)
	}
	_, page := get("/metrics")
	if !strings.Contains(page, metricname.GPUObservedSeconds+`{uuid="GPU-1"} 2`) || !strings.Contains(page, stageAge+`{stage="gpu"} `) {
		t.Errorf("the page of a stuck driver:\n%s", page)
	}
	// The other stages go on.
	until(t, get, "/metrics", metricname.PodMappingErrors+`{reason="unreachable"} 4`)
	began := time.Now()
	if err := stop(); err != nil {
		t.Errorf("Run: %v", err)
	}
	if took := time.Since(began); took > grace+time.Second {
		t.Errorf("the end took %s", took)
	}
}

func TestDriverNeedsRestart(t *testing.T) {
	driver := &fakeReader{read: func(n int64, now time.Time) gpu.Reading {
		return gpu.Reading{At: now, Err: fmt.Errorf("driver 590 was replaced by 600: %w", gpu.ErrRestart)}
	}}
	err := Run(t.Context(), config(driver))
	if err == nil || !strings.Contains(err.Error(), "driver 590 was replaced by 600") || !driver.closed.Load() {
		t.Errorf("Run: %v; closed %t", err, driver.closed.Load())
	}
}

// letGo is a driver that is let go of and taken up again.
type letGo struct{ open, opens, reads atomic.Int64 }

func (d *letGo) Read(now time.Time) gpu.Reading {
	if d.open.Swap(1) == 0 {
		d.opens.Add(1)
	}
	return steady(d.reads.Add(1), now)
}

func (d *letGo) Close() error { d.open.Store(0); return nil }

// gpu-operator's driver upgrade and dcgm-exporter#706: who holds the driver must be able to let go of it without ending.
func TestReleaseAndResume(t *testing.T) {
	driver, release := &letGo{}, make(chan bool)
	cfg := config(driver)
	cfg.Interval, cfg.Release = 100*time.Millisecond, release
	get, _ := start(t, cfg)
	until(t, get, "/metrics", metricname.GPUBusySeconds+`{uuid="GPU-1"} `)
	release <- true
	until(t, get, "/readyz", "let go of on request", "capstan-exporter resume")
	page := until(t, get, "/metrics", metricname.LibraryUp+" 0")
	if strings.Contains(page, metricname.GPUBusySeconds+"{") || driver.open.Load() != 0 {
		t.Errorf("released, and still open (%d) or on the page:\n%s", driver.open.Load(), page)
	}
	if code, body := get("/livez"); code != 200 {
		t.Errorf("/livez %d %s: letting go is no fault", code, body)
	}
	release <- false
	until(t, get, "/metrics", metricname.GPUBusySeconds+`{uuid="GPU-1"} `, metricname.LibraryUp+" 1")
	if n := driver.opens.Load(); n != 2 {
		t.Errorf("opened %d times, want 2", n)
	}
}

func TestAddressInUse(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	cfg := config(&fakeReader{read: steady})
	cfg.Listen = l.Addr().String()
	if err := Run(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), cfg.Listen) {
		t.Errorf("Run: %v, want an error with %s", err, cfg.Listen)
	}
}

// The clock of the readings is the interval's, from the first moment on; a slow reading delays the next, never doubles it.
func TestGPULoop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		driver := &fakeReader{read: func(n int64, now time.Time) gpu.Reading {
			if n == 5 {
				time.Sleep(3500 * time.Millisecond)
			}
			return steady(n, now)
		}}
		b := newBoard()
		b.mapped(podmap.Mapping{At: time.Now(), Allocations: []podmap.Allocation{held("u1", "GPU-1")}})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- gpuLoop(ctx, config(driver), b) }()
		synctest.Wait()
		if s := b.snapshot(); driver.reads.Load() != 1 || *s.Usage[0].Observed != 0 {
			t.Errorf("at the start: %d reads, %+v", driver.reads.Load(), s.Usage)
		}
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if s := b.snapshot(); driver.reads.Load() != 4 || *s.Usage[0].Observed != 3 || *s.Usage[0].Busy != 1.5 {
			t.Errorf("after 3 s: %d reads, %+v", driver.reads.Load(), s.Usage)
		}
		time.Sleep(3 * time.Second) // the fifth has begun and sleeps
		synctest.Wait()
		if age := b.snapshot().Stages[stageGPU].Age(time.Now()); driver.reads.Load() != 5 || age != 3*time.Second {
			t.Errorf("while it is slow: %d reads, age %s", driver.reads.Load(), age)
		}
		// A pod that leaves meanwhile is gone from the page, though the driver does not answer.
		b.mapped(podmap.Mapping{At: time.Now()})
		if s := b.snapshot(); len(s.Usage) != 0 {
			t.Errorf("a pod that left: %+v", s.Usage)
		}
		b.trained(time.Now(), trainer.Result{Pages: []trainer.Page{{UID: "u1"}, {UID: "u2"}}})
		b.mapped(podmap.Mapping{At: time.Now(), Pods: []podmap.Pod{{UID: "u2"}}})
		if s := b.snapshot(); len(s.Training.Pages) != 1 || s.Training.Pages[0].UID != "u2" {
			t.Errorf("a trainer that left: %+v", s.Training.Pages)
		}
		time.Sleep(2 * time.Second)
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if n := driver.reads.Load(); n < 6 || n > 8 {
			t.Errorf("%d reads after 8 s of which 3.5 were one, want 6 to 8", n)
		}
	})
}

func TestSomeFamiliesOnly(t *testing.T) {
	driver := &fakeReader{read: steady}
	cfg := config(driver)
	cfg.Interval = 100 * time.Millisecond
	get, _ := start(t, cfg)
	until(t, get, "/metrics", metricname.GPUBusySeconds+"{")
	_, body := get("/metrics?name[]=" + metricname.GPUUp + "&name[]=" + metricname.GPUBusySeconds + "&name[]=there_is_none")
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(body))
	if err != nil || len(families) != 2 || families[metricname.GPUUp] == nil || families[metricname.GPUBusySeconds] == nil {
		t.Errorf("%v in\n%s", err, body)
	}
}

// A bug report's dump can be read by a program, and holds what is needed.
func TestDebugState(t *testing.T) {
	driver := &fakeReader{read: func(n int64, now time.Time) gpu.Reading {
		r := steady(n, now)
		r.Err = gpu.ErrNoLibrary
		return r
	}}
	cfg := config(driver)
	cfg.Interval, cfg.NodeName = 100*time.Millisecond, "node-1"
	get, _ := start(t, cfg)
	until(t, get, "/debug/state", "GPU-1")
	_, body := get("/debug/state")
	var s struct {
		Flags   struct{ NodeName, Interval string }
		Missing []string
		GPUs    struct {
			Error   string
			Devices []struct{ UUID string }
		}
		Process struct{ Goroutines int }
	}
	if err := json.Unmarshal([]byte(body), &s); err != nil {
		t.Fatal(err)
	}
	if s.Flags.NodeName != "node-1" || s.Flags.Interval != "100ms" || len(s.Missing) == 0 || s.GPUs.Error != gpu.ErrNoLibrary.Error() || s.GPUs.Devices[0].UUID != "GPU-1" || s.Process.Goroutines == 0 {
		t.Errorf("%+v", s)
	}
}

// authority makes certificates for a test.
type authority struct {
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{dir: t.TempDir()}
	a.cert, a.key = a.issue(t, "ca", &x509.Certificate{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign})
	return a
}

// issue writes NAME.crt and NAME.key.
func (a *authority) issue(t *testing.T, name string, template *x509.Certificate) (*x509.Certificate, *ecdsa.PrivateKey) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template.SerialNumber, template.NotBefore, template.NotAfter = big.NewInt(time.Now().UnixNano()), time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	template.Subject = pkix.Name{CommonName: name}
	parent, signer := a.cert, a.key
	if parent == nil {
		parent, signer = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	if err != nil {
		t.Fatal(err)
	}
	bits, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	for file, block := range map[string]*pem.Block{name + ".crt": {Type: "CERTIFICATE", Bytes: der}, name + ".key": {Type: "PRIVATE KEY", Bytes: bits}} {
		if err := os.WriteFile(filepath.Join(a.dir, file), pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return cert, key
}

// Only who has a certificate with the right name gets the page; a probe needs none, and gets nothing but its answer.
func TestClientCertificates(t *testing.T) {
	a := newAuthority(t)
	a.issue(t, "server", &x509.Certificate{IPAddresses: []net.IP{{127, 0, 0, 1}}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
	for _, name := range []string{"adapter", "stranger"} {
		a.issue(t, name, &x509.Certificate{DNSNames: []string{name + ".capstan"}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	}
	web := filepath.Join(a.dir, "web.yaml")
	if err := os.WriteFile(web, fmt.Appendf(nil, "tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.crt\n  client_allowed_sans: [adapter.capstan]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	probe, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	probe.Close() // its port is free for a moment, and nobody else here takes one

	cfg := config(&fakeReader{read: steady})
	cfg.WebConfig, cfg.ProbeListen = web, probe.Addr().String()
	local, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	local.Close()
	cfg.LocalListen = local.Addr().String()
	where := make(chan net.Addr, 1)
	cfg.OnListen = func(a net.Addr) { where <- a }
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- Run(ctx, cfg) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	address := (<-where).String()
	as := func(name string) (int, error) {
		pool := x509.NewCertPool()
		pool.AddCert(a.cert)
		config := &tls.Config{RootCAs: pool}
		if name != "" {
			pair, err := tls.LoadX509KeyPair(filepath.Join(a.dir, name+".crt"), filepath.Join(a.dir, name+".key"))
			if err != nil {
				t.Fatal(err)
			}
			config.Certificates = []tls.Certificate{pair}
		}
		client := &http.Client{Transport: &http.Transport{TLSClientConfig: config}}
		defer client.CloseIdleConnections()
		response, err := client.Get("https://" + address + "/metrics")
		if err != nil {
			return 0, err
		}
		response.Body.Close()
		return response.StatusCode, nil
	}
	if code, err := as("adapter"); code != 200 {
		t.Errorf("with the right certificate: %d, %v", code, err)
	}
	for _, name := range []string{"", "stranger"} {
		if code, err := as(name); err == nil {
			t.Errorf("as %q: %d, want no connection", name, code)
		}
	}
	response, err := http.Get("http://" + cfg.ProbeListen + "/livez")
	if err != nil || response.StatusCode != 200 {
		t.Errorf("a probe: %v, %v", response, err)
	}
	if response, err := http.Get("http://" + cfg.ProbeListen + "/metrics"); err != nil || response.StatusCode != 404 {
		t.Errorf("the page without a certificate: %v, %v; want 404", response, err)
	}
	if response, err := http.Get("http://" + cfg.LocalListen + "/metrics"); err != nil || response.StatusCode != 200 {
		t.Errorf("the page on the loopback address: %v, %v", response, err)
	}
}

func TestWebConfigIsChecked(t *testing.T) {
	cfg := config(&fakeReader{read: steady})
	cfg.WebConfig = filepath.Join(t.TempDir(), "none.yaml")
	if err := Run(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), "WebConfig is") {
		t.Errorf("a file that is not there: %v", err)
	}
}

// Who asks for a page in one form gets the one that is there; it is made anew after a reading or at the end of its lifetime. Each
// form is made for itself, and strange forms are not kept.
func TestPages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var rendered atomic.Int64
		p := newPages(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			fmt.Fprint(w, r.Header.Get("Accept"), " ", rendered.Add(1))
		}), time.Second)
		get := func(accept string) string {
			r, _ := http.NewRequest("GET", "/metrics", nil)
			r.Header.Set("Accept", accept)
			return p.newest(p.form(r), time.Now(), p.lifetime).body.String()
		}
		want := func(what, accept, page string) {
			t.Helper()
			if got := get(accept); got != page {
				t.Errorf("%s: page %q, want %q", what, got, page)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		read := make(chan struct{})
		var group sync.WaitGroup
		group.Go(func() { p.run(ctx, read) })
		want("first", "a", "a 1")
		for range 50 {
			group.Go(func() { want("at once", "a", "a 1") })
		}
		want("another form", "b", "b 2")
		time.Sleep(time.Second)
		want("within its lifetime", "a", "a 1")
		read <- struct{}{}
		synctest.Wait()
		if n := rendered.Load(); n != 4 {
			t.Errorf("after a reading %d pages were made, want 4", n)
		}
		read <- struct{}{} // at once again: there is a page of this moment
		synctest.Wait()
		if n := rendered.Load(); n != 4 {
			t.Errorf("after two readings at once %d pages were made, want 4", n)
		}
		get("a")
		time.Sleep(p.lifetime) // no reading comes
		get("a")
		if n := rendered.Load(); n != 5 {
			t.Errorf("after its lifetime %d pages were made, want 5", n)
		}
		time.Sleep(lately)
		read <- struct{}{}
		synctest.Wait()
		if n := rendered.Load(); n != 5 {
			t.Errorf("nobody asks any more, but %d pages were made, want 5", n)
		}
		for i := range 100 {
			get(fmt.Sprint(i))
		}
		if len(p.forms) > maxForms {
			t.Errorf("%d forms kept, at most %d", len(p.forms), maxForms)
		}
		cancel()
		group.Wait()
	})
}

func TestCompressed(t *testing.T) {
	get, _ := start(t, config(&fakeReader{read: steady}))
	until(t, get, "/metrics", metricname.GPUUp)
	cfg := config(&fakeReader{read: steady})
	where := make(chan net.Addr, 1)
	cfg.OnListen = func(a net.Addr) { where <- a }
	go Run(t.Context(), cfg)
	request, _ := http.NewRequest("GET", "http://"+(<-where).String()+"/metrics", nil)
	request.Header.Set("Accept-Encoding", "gzip")
	request.Header.Set("Accept", "application/openmetrics-text;version=1.0.0")
	response, err := (&http.Transport{DisableCompression: true}).RoundTrip(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if response.Header.Get("Content-Encoding") != "gzip" || !strings.HasPrefix(response.Header.Get("Content-Type"), "application/openmetrics-text") {
		t.Errorf("header %v", response.Header)
	}
	z, err := gzip.NewReader(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	if body, err := io.ReadAll(z); err != nil || !strings.HasSuffix(string(body), "# EOF\n") {
		t.Errorf("body %q, %v", body, err)
	}
}

// A page is made ahead for who is about to ask, by how long they paused before; not for every reading in between.
func TestPagesAheadOfAScrape(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rendered := 0
		p := newPages(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { rendered++ }), time.Second)
		ctx, cancel := context.WithCancel(t.Context())
		read := make(chan struct{})
		var group sync.WaitGroup
		group.Go(func() { p.run(ctx, read) })
		scrape := func() {
			r, _ := http.NewRequest("GET", "/metrics", nil)
			p.newest(p.form(r), time.Now(), p.lifetime)
		}
		// A scrape every 5 s, a reading every second in between.
		for i := range 60 {
			if i%5 == 0 {
				before := rendered
				scrape()
				if ahead := rendered == before; i > 10 && !ahead {
					t.Errorf("the scrape at %d s had to wait for its page", i)
				}
			}
			time.Sleep(900 * time.Millisecond)
			read <- struct{}{}
			time.Sleep(100 * time.Millisecond)
		}
		if rendered > 17 { // two before the pause is known, and one for each reading that a scrape follows
			t.Errorf("%d pages were made for 12 scrapes", rendered)
		}
		cancel()
		group.Wait()
	})
}
