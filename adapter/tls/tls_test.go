package tls

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
	fakeaggregator "k8s.io/kube-aggregator/pkg/client/clientset_generated/clientset/fake"
)

const (
	apiService = "v1beta1.external.metrics.k8s.io"
	serverName = "capstan-adapter.capstan-system.svc"
)

var (
	usages = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	names  = Purpose{Names("capstan-adapter", "capstan-system"), usages}
)

// settle does all that is due.
func settle(t *testing.T, m Material, p Policy, now time.Time) (Material, []Action) {
	t.Helper()
	var done []Action
	for range 10 {
		a, why := m.Next(names, p, now)
		if a == Keep {
			return m, done
		}
		if why == "" {
			t.Errorf("%s without a reason", a)
		}
		var err error
		if m, err = m.Do(a, names, p, now); err != nil {
			t.Fatal(err)
		}
		done = append(done, a)
	}
	t.Fatalf("it never ends: %v", done)
	return m, nil
}

// verify is what a client does that knows a bundle.
func verify(bundle []byte, cert *x509.Certificate, now time.Time) error {
	return verifyAs(serverName, x509.ExtKeyUsageServerAuth, bundle, cert, now)
}

func verifyAs(name string, use x509.ExtKeyUsage, bundle []byte, cert *x509.Certificate, now time.Time) error {
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(bundle)
	_, err := cert.Verify(x509.VerifyOptions{Roots: pool, CurrentTime: now, DNSName: name, KeyUsages: []x509.ExtKeyUsage{use}})
	return err
}

const exporterName = "capstan-exporter.capstan-node.svc"

var exporters = Purpose{Names("capstan-exporter", "capstan-node"), []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}

// TestLife runs many generations of CAs and certificates, and at each step lets clients know only an older bundle, and
// servers serve an older certificate, as another replica or a node's kubelet would for a while.
func TestLife(t *testing.T) {
	policy := Policy{CAValidity: 12 * time.Hour, CertValidity: 3 * time.Hour, Overlap: 18 * time.Minute}
	const lag = 15 * time.Minute // of the slowest replica or client; less than the overlap
	start := time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC)
	type moment struct {
		at time.Time
		Material
		theirs map[string][]byte // the exporters' Secret
	}
	var history []moment
	var secret map[string][]byte
	handedOut := 0
	counts := map[Action]int{}
	var m Material
	for now := start; now.Before(start.Add(60 * time.Hour)); now = now.Add(time.Minute) {
		var done []Action
		m, done = settle(t, m, policy, now)
		for _, a := range done {
			counts[a]++
		}
		theirs, why, err := m.Hand(secret, exporters, policy, now)
		if err != nil {
			t.Fatal(err)
		}
		if why != "" {
			handedOut++
		}
		cert, err := handed(theirs)
		if err != nil {
			t.Fatal(err)
		}
		m.Handed = []*x509.Certificate{cert}
		secret = theirs
		history = append(history, moment{now, m, theirs})
		for len(history) > 1 && now.Sub(history[1].at) >= lag {
			history = history[1:]
		}
		old := history[0].Material
		oldTheirs := history[0].theirs
		oldCert, err := handed(oldTheirs)
		if err != nil {
			t.Fatal(err)
		}
		for what, err := range map[string]error{
			"now":                                verify(m.Bundle(), m.Serving.Cert, now),
			"an old bundle, the new certificate": verify(old.Bundle(), m.Serving.Cert, now),
			"the new bundle, an old certificate": verify(m.Bundle(), old.Serving.Cert, now),
			"an exporter with an old Secret":     verifyAs(exporterName, x509.ExtKeyUsageServerAuth, m.Bundle(), oldCert, now),
			"an old replica, a new exporter":     verifyAs(exporterName, x509.ExtKeyUsageServerAuth, old.Bundle(), cert, now),
			"an exporter's old bundle":           verifyAs(serverName, x509.ExtKeyUsageClientAuth, oldTheirs["ca.crt"], m.Serving.Cert, now),
			"an exporter's new bundle":           verifyAs(serverName, x509.ExtKeyUsageClientAuth, theirs["ca.crt"], old.Serving.Cert, now),
		} {
			if err != nil && !(now.Sub(start) < lag) {
				t.Fatalf("%s: %s: %v", now.Sub(start), what, err)
			}
		}
		if left := m.Serving.Cert.NotAfter.Sub(now); left < 30*time.Minute {
			t.Fatalf("%s: only %s left", now.Sub(start), left)
		}
		if len(m.Older) > 1 {
			t.Fatalf("%s: %d older CAs", now.Sub(start), len(m.Older))
		}
	}
	if counts[NewCA] < 6 || counts[NewCert] < 20 || counts[Prune] < 5 || handedOut < 30 {
		t.Errorf("in 60 hours: %v, and %d new Secrets of the exporters", counts, handedOut)
	}
}

func TestNext(t *testing.T) {
	policy := Policy{CAValidity: 1000 * time.Hour, CertValidity: 100 * time.Hour, Overlap: time.Hour}
	start := time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC)
	m, done := settle(t, Material{}, policy, start)
	if len(done) != 2 || done[0] != NewCA || done[1] != NewCert {
		t.Errorf("from nothing: %v", done)
	}
	f := func(what string, m Material, serving Purpose, now time.Time, want Action) {
		t.Helper()
		if got, why := m.Next(serving, policy, now); got != want {
			t.Errorf("%s: %s (%s), want %s", what, got, why, want)
		}
	}
	f("just made", m, names, start, Keep)
	f("after a while", m, names, start.Add(60*time.Hour), Keep)
	f("a third left", m, names, start.Add(68*time.Hour), NewCert)
	f("expired", m, names, start.Add(101*time.Hour), NewCert)
	f("another Service", m, Purpose{Names("other", "capstan-system"), usages}, start, NewCert)
	f("another use", m, Purpose{names.Names, usages[:1]}, start, NewCert)
	f("a third of the CA left", m, names, start.Add(680*time.Hour), NewCA)
	f("the CA expired", m, names, start.Add(1001*time.Hour), NewCA)
	other, _ := settle(t, Material{}, policy, start)
	f("signed by a stranger", Material{Signer: m.Signer, Serving: other.Serving}, names, start, NewCert)
	f("no certificate", Material{Signer: m.Signer}, names, start, NewCert)

	// A new CA is not used before everybody can know it.
	rolled, err := m.Do(NewCA, names, policy, start.Add(10*time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	f("a new CA", rolled, names, start.Add(10*time.Hour), Keep)
	f("known by all", rolled, names, start.Add(11*time.Hour+time.Minute), NewCert)

	data, err := m.Data()
	if err != nil {
		t.Fatal(err)
	}
	back, err := Parse(data)
	if err != nil {
		t.Fatal(err)
	}
	again, err := back.Data()
	if err != nil || !bytes.Equal(again["tls.crt"], data["tls.crt"]) || !bytes.Equal(again["ca.crt"], data["ca.crt"]) || !bytes.Equal(again["ca.key"], data["ca.key"]) {
		t.Errorf("not the same after a round trip (%v)", err)
	}
	for _, bad := range []map[string][]byte{
		{"tls.crt": data["tls.crt"], "tls.key": data["tls.key"]},
		{"ca.crt": data["ca.crt"]},
		{"ca.crt": data["ca.crt"], "ca.key": data["tls.key"]},
		{"ca.crt": data["ca.crt"], "ca.key": data["ca.key"], "tls.crt": []byte("x"), "tls.key": data["tls.key"]},
		{"ca.crt": append([]byte("x"), data["ca.crt"]...), "ca.key": data["ca.key"]},
	} {
		if bytes.Equal(bad["ca.crt"], append([]byte("x"), data["ca.crt"]...)) {
			continue // PEM allows text before a block
		}
		if _, err := Parse(bad); err == nil {
			t.Errorf("no error for %d keys", len(bad))
		}
	}
}

func FuzzParse(f *testing.F) {
	m := Material{}
	for _, a := range []Action{NewCA, NewCert} {
		m, _ = m.Do(a, names, Policy{CAValidity: time.Hour, CertValidity: time.Hour}, time.Unix(1_800_000_000, 0))
	}
	data, err := m.Data()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data["ca.crt"], data["ca.key"], data["tls.crt"], data["tls.key"])
	f.Add([]byte(nil), []byte(nil), []byte(nil), []byte(nil))
	f.Fuzz(func(t *testing.T, ca, caKey, cert, key []byte) {
		m, err := Parse(map[string][]byte{"ca.crt": ca, "ca.key": caKey, "tls.crt": cert, "tls.key": key})
		if err != nil {
			return
		}
		// Whatever was readable can be carried on with, and ends well.
		if m, _ = settle(t, m, Policy{CAValidity: 3 * time.Hour, CertValidity: time.Hour, Overlap: time.Minute}, time.Unix(1_800_000_000, 0)); m.Serving == nil {
			t.Error("no certificate")
		}
	})
}

func ours(owner string) *apiregistrationv1.APIService {
	namespace, name, _ := strings.Cut(owner, "/")
	return &apiregistrationv1.APIService{
		ObjectMeta: metav1.ObjectMeta{Name: apiService, ResourceVersion: "7"},
		Spec:       apiregistrationv1.APIServiceSpec{Service: &apiregistrationv1.ServiceReference{Namespace: namespace, Name: name}, Group: "external.metrics.k8s.io", Version: "v1beta1"},
	}
}

func TestPatch(t *testing.T) {
	bundle := []byte("bundle")
	fine := ours("capstan-system/capstan-adapter")
	patch, err := Patch(fine, "capstan-system", "capstan-adapter", bundle)
	if err != nil {
		t.Fatal(err)
	}
	if want := `{"metadata":{"resourceVersion":"7"},"spec":{"caBundle":"YnVuZGxl","insecureSkipTLSVerify":false}}`; string(patch) != want {
		t.Errorf("patch %s, want %s", patch, want)
	}
	fine.Spec.CABundle = bundle
	if patch, err := Patch(fine, "capstan-system", "capstan-adapter", bundle); patch != nil || err != nil {
		t.Errorf("nothing to do: %s %v", patch, err)
	}
	fine.Spec.InsecureSkipTLSVerify = true
	if patch, _ := Patch(fine, "capstan-system", "capstan-adapter", bundle); patch == nil {
		t.Error("insecureSkipTLSVerify stays")
	}
	var foreign *ForeignError
	if patch, err := Patch(ours("keda/keda-operator-metrics-apiserver"), "capstan-system", "capstan-adapter", bundle); patch != nil || !errors.As(err, &foreign) || !strings.Contains(err.Error(), "Service keda/keda-operator-metrics-apiserver") {
		t.Errorf("a foreign one: %s %v", patch, err)
	}
	local := ours("x/y")
	local.Spec.Service = nil
	if patch, err := Patch(local, "capstan-system", "capstan-adapter", bundle); patch != nil || !errors.As(err, &foreign) {
		t.Errorf("a local one: %s %v", patch, err)
	}
}

type rig struct {
	client     *fake.Clientset
	aggregator *fakeaggregator.Clientset
	log        bytes.Buffer
}

func (r *rig) manager() *Manager {
	return New(Config{Client: r.client, Aggregator: r.aggregator, Namespace: "capstan-system", Secret: "capstan-adapter-tls", Service: "capstan-adapter",
		APIServices: []string{apiService}, Pod: "capstan-adapter-1", Handed: []Handed{{"capstan-node", "capstan-exporter-tls", exporters}}, Logger: slog.New(slog.NewTextHandler(&r.log, nil))})
}

func (r *rig) bundle(t *testing.T) []byte {
	t.Helper()
	s, err := r.aggregator.ApiregistrationV1().APIServices().Get(t.Context(), apiService, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return s.Spec.CABundle
}

func newRig(owner string) *rig {
	r := &rig{client: fake.NewClientset(), aggregator: fakeaggregator.NewClientset(ours(owner))}
	return r
}

type listener struct{ n int }

func (l *listener) Enqueue() { l.n++ }

func TestManager(t *testing.T) {
	r := newRig("capstan-system/capstan-adapter")
	first, second := r.manager(), r.manager()
	var heard listener
	first.AddListener(&heard)
	now := time.Now()
	for _, m := range []*Manager{first, second} {
		if err := m.Sync(t.Context(), now); err != nil {
			t.Fatal(err)
		}
	}
	a, _ := first.CurrentCertKeyContent()
	b, _ := second.CurrentCertKeyContent()
	if a == nil || !bytes.Equal(a, b) {
		t.Error("two replicas do not serve the same certificate")
	}
	select {
	case <-first.Ready():
	default:
		t.Error("not ready with a certificate")
	}
	if heard.n != 1 {
		t.Errorf("the listener was told %d times, want 1", heard.n)
	}
	certs, err := parseCerts(a)
	if err != nil {
		t.Fatal(err)
	}
	if err := verify(r.bundle(t), certs[0], now); err != nil {
		t.Errorf("the API server could not verify it: %v", err)
	}
	if !first.Expiry().Equal(certs[0].NotAfter) {
		t.Errorf("expiry %s, want %s", first.Expiry(), certs[0].NotAfter)
	}
	writes := func() (n int) {
		for _, actions := range [][]clienttesting.Action{r.client.Actions(), r.aggregator.Actions()} {
			for _, a := range actions {
				if a.GetVerb() != "get" {
					n++
				}
			}
		}
		return n
	}
	if n := writes(); n != 3 {
		t.Errorf("%d writes, want one of each Secret and one of the APIService", n)
	}
	if err := first.Sync(t.Context(), now.Add(time.Hour)); err != nil || writes() != 3 {
		t.Errorf("a look changed something: %v, %d writes", err, writes())
	}

	// Renewed before it ends; the other replica takes it over.
	if err := first.Sync(t.Context(), now.Add(61*24*time.Hour)); err != nil {
		t.Fatal(err)
	}
	if err := second.Sync(t.Context(), now.Add(61*24*time.Hour)); err != nil {
		t.Fatal(err)
	}
	c, _ := second.CurrentCertKeyContent()
	if bytes.Equal(a, c) || heard.n != 2 {
		t.Errorf("not renewed (listener told %d times)", heard.n)
	}

	// Somebody spoils the Secret: made anew, and the bundle with it.
	secret, err := r.client.CoreV1().Secrets("capstan-system").Get(t.Context(), "capstan-adapter-tls", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	// First of the certificate alone: the CA stays, which everybody trusts.
	trusted := r.bundle(t)
	secret.Data["tls.crt"] = []byte("junk")
	if secret, err = r.client.CoreV1().Secrets("capstan-system").Update(t.Context(), secret, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := first.Sync(t.Context(), now); err != nil {
		t.Fatal(err)
	}
	e, _ := first.CurrentCertKeyContent()
	if bytes.Equal(e, c) || !bytes.Equal(r.bundle(t), trusted) {
		t.Error("a spoiled certificate is not mended, or the CA was changed for it")
	}
	secret.Data = map[string][]byte{"tls.crt": []byte("junk"), "tls.key": []byte("junk")}
	if _, err := r.client.CoreV1().Secrets("capstan-system").Update(t.Context(), secret, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := first.Sync(t.Context(), now); err != nil {
		t.Fatal(err)
	}
	d, _ := first.CurrentCertKeyContent()
	certs, _ = parseCerts(d)
	if err := verify(r.bundle(t), certs[0], now); err != nil {
		t.Error(err)
	}
}

// TestRace: another replica makes the Secret between our look and our write.
func TestRace(t *testing.T) {
	elsewhere := newRig("capstan-system/capstan-adapter")
	if err := elsewhere.manager().Sync(t.Context(), time.Now()); err != nil {
		t.Fatal(err)
	}
	theirs, err := elsewhere.client.CoreV1().Secrets("capstan-system").Get(t.Context(), "capstan-adapter-tls", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	r := newRig("capstan-system/capstan-adapter")
	raced := false
	r.client.PrependReactor("create", "secrets", func(clienttesting.Action) (bool, runtime.Object, error) {
		if !raced {
			raced = true
			if err := r.client.Tracker().Add(theirs); err != nil {
				t.Error(err)
			}
		}
		return false, nil, nil
	})
	m := r.manager()
	if err := m.Sync(t.Context(), time.Now()); err != nil {
		t.Fatal(err)
	}
	if cert, _ := m.CurrentCertKeyContent(); !raced || !bytes.Equal(cert, theirs.Data["tls.crt"]) {
		t.Error("two replicas do not serve the same certificate")
	}
}

func TestForeign(t *testing.T) {
	r := newRig("keda/keda-operator-metrics-apiserver")
	m := r.manager()
	for range 2 {
		m.say(m.Sync(t.Context(), time.Now()))
	}
	if cert, _ := m.CurrentCertKeyContent(); cert == nil {
		t.Error("no certificate")
	}
	if err := m.Foreign(); err == nil || !strings.Contains(err.Error(), "keda/keda-operator-metrics-apiserver") {
		t.Errorf("Foreign() = %v", err)
	}
	if r.bundle(t) != nil {
		t.Error("a foreign APIService was touched")
	}
	if n := strings.Count(r.log.String(), "keda/"); n != 1 {
		t.Errorf("logged %d times:\n%s", n, &r.log)
	}
	events := func() []corev1.Event {
		list, err := r.client.CoreV1().Events("capstan-system").List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return list.Items
	}
	if e := events(); len(e) != 1 || e[0].InvolvedObject.Name != "capstan-adapter-1" || !strings.Contains(e[0].Message, "keda") {
		out, _ := json.Marshal(e)
		t.Errorf("events: %s", out)
	}

	// Its owner goes, and the manifest is applied again.
	if err := r.aggregator.Tracker().Update(apiregistrationv1.SchemeGroupVersion.WithResource("apiservices"), ours("capstan-system/capstan-adapter"), ""); err != nil {
		t.Fatal(err)
	}
	m.say(m.Sync(t.Context(), time.Now()))
	if m.Foreign() != nil || r.bundle(t) == nil || len(events()) != 1 {
		t.Errorf("foreign %v, bundle of %d bytes, %d events", m.Foreign(), len(r.bundle(t)), len(events()))
	}
	if !strings.Contains(r.log.String(), "as they should be") {
		t.Errorf("not logged that it is right now:\n%s", &r.log)
	}
}

// TestRun: an API server that is away costs nothing but time.
func TestRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig("capstan-system/capstan-adapter")
		away := true
		r.client.PrependReactor("get", "secrets", func(clienttesting.Action) (bool, runtime.Object, error) {
			return away, nil, errors.New("connection refused")
		})
		m := r.manager()
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { m.Run(ctx); close(done) }()
		time.Sleep(time.Minute)
		if n := strings.Count(r.log.String(), "connection refused"); n != 1 {
			t.Errorf("logged %d times in a minute", n)
		}
		away = false
		begin := time.Now()
		<-m.Ready()
		if took := time.Since(begin); took > 10*time.Second {
			t.Errorf("ready only after %s", took)
		}
		cancel()
		<-done
	})
}

// TestHanded: what the exporters are given has no key of the CA, is mended when somebody spoils it, and no CA goes while it is not known
// what they have.
func TestHanded(t *testing.T) {
	r := newRig("capstan-system/capstan-adapter")
	m := r.manager()
	secrets := r.client.CoreV1().Secrets("capstan-node")
	now := time.Now()
	look := func(now time.Time) map[string][]byte {
		t.Helper()
		if err := m.Sync(t.Context(), now); err != nil {
			t.Fatal(err)
		}
		s, err := secrets.Get(t.Context(), "capstan-exporter-tls", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return s.Data
	}
	first := look(now)
	if len(first) != 3 || len(first["tls.crt"]) == 0 || len(first["tls.key"]) == 0 || !bytes.Equal(first["ca.crt"], m.current.Load().bundle) {
		t.Errorf("the exporters' Secret has %d entries, want certificate, key and the bundle", len(first))
	}
	s, _ := secrets.Get(t.Context(), "capstan-exporter-tls", metav1.GetOptions{})
	s.Data["tls.key"] = []byte("junk")
	if _, err := secrets.Update(t.Context(), s, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if mended := look(now); bytes.Equal(mended["tls.crt"], first["tls.crt"]) || !bytes.Equal(mended["ca.crt"], first["ca.crt"]) {
		t.Error("a spoiled Secret is not mended, or the CA was changed for it")
	}

	// A new CA, while the exporters' Secret cannot be read: both CAs stay in the bundle, however long it takes.
	late := now.Add(4 * 365 * 24 * time.Hour)
	forbidden := true
	r.client.PrependReactor("get", "secrets", func(a clienttesting.Action) (bool, runtime.Object, error) {
		return forbidden && a.GetNamespace() == "capstan-node", nil, errors.New("forbidden")
	})
	for i := range 20 {
		if err := m.Sync(t.Context(), late.Add(time.Duration(i)*time.Hour)); err == nil || !strings.Contains(err.Error(), "capstan-node/capstan-exporter-tls") {
			t.Fatalf("Sync: %v, want an error that names the Secret", err)
		}
	}
	bundle, err := parseCerts(m.current.Load().bundle)
	if err != nil || len(bundle) != 2 {
		t.Errorf("%d CAs in the bundle (%v), want the new and the old", len(bundle), err)
	}
	forbidden = false
	look(late.Add(21 * time.Hour))
	look(late.Add(24 * time.Hour))
	if bundle, err := parseCerts(look(late.Add(24 * time.Hour))["ca.crt"]); err != nil || len(bundle) != 1 {
		t.Errorf("%d CAs in the bundle (%v), want the new one alone", len(bundle), err)
	}
}

// TestClient: the adapter gets a page from the holder of the exporters' certificate and from nobody else, shows who it is itself, and goes
// on doing so after a rotation.
func TestClient(t *testing.T) {
	r := newRig("capstan-system/capstan-adapter")
	m := r.manager()
	get := func(address string) error {
		rt := m.Client(exporterName, func(c *tls.Config) *http.Transport { return &http.Transport{TLSClientConfig: c} })
		response, err := (&http.Client{Transport: rt}).Get(address)
		if err != nil {
			return err
		}
		defer response.Body.Close()
		name, err := io.ReadAll(response.Body)
		if err == nil && string(name) != serverName {
			return fmt.Errorf("the exporter sees %q, want %q", name, serverName)
		}
		return err
	}
	serve := func(cert, key, ca []byte) string {
		server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			io.WriteString(w, r.TLS.PeerCertificates[0].DNSNames[0])
		}))
		pair, err := tls.X509KeyPair(cert, key)
		if err != nil {
			t.Fatal(err)
		}
		pool := x509.NewCertPool()
		pool.AppendCertsFromPEM(ca)
		server.TLS = &tls.Config{Certificates: []tls.Certificate{pair}, ClientCAs: pool, ClientAuth: tls.RequireAndVerifyClientCert}
		server.Config.ErrorLog = log.New(io.Discard, "", 0)
		server.StartTLS()
		t.Cleanup(server.Close)
		return server.URL
	}
	if err := get("https://127.0.0.1:1"); err == nil || !strings.Contains(err.Error(), "no certificate yet") {
		t.Errorf("before there is a certificate: %v", err)
	}
	look := func(now time.Time) map[string][]byte {
		if err := m.Sync(t.Context(), now); err != nil {
			t.Fatal(err)
		}
		s, err := r.client.CoreV1().Secrets("capstan-node").Get(t.Context(), "capstan-exporter-tls", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return s.Data
	}
	theirs := look(time.Now().Add(-61 * 24 * time.Hour)) // so that the next look renews
	exporter := serve(theirs["tls.crt"], theirs["tls.key"], theirs["ca.crt"])
	if err := get(exporter); err != nil {
		t.Error(err)
	}
	before := m.current.Load()
	look(time.Now())
	if m.current.Load() == before {
		t.Fatal("not renewed")
	}
	if err := get(exporter); err != nil {
		t.Errorf("after a rotation: %v", err)
	}
	own := m.current.Load()
	if err := get(serve(own.cert, own.key, own.bundle)); err == nil || !strings.Contains(err.Error(), "certificate is valid for") {
		t.Errorf("a server with another of the CA's certificates: %v", err)
	}
	stranger := newRig("capstan-system/capstan-adapter")
	other := stranger.manager()
	if err := other.Sync(t.Context(), time.Now()); err != nil {
		t.Fatal(err)
	}
	s, err := stranger.client.CoreV1().Secrets("capstan-node").Get(t.Context(), "capstan-exporter-tls", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := get(serve(s.Data["tls.crt"], s.Data["tls.key"], theirs["ca.crt"])); err == nil || !strings.Contains(err.Error(), "unknown authority") {
		t.Errorf("a server of another CA: %v", err)
	}
	if err := get(serve(theirs["tls.crt"], theirs["tls.key"], s.Data["ca.crt"])); err == nil {
		t.Error("an exporter that trusts another CA let us in")
	}
}
