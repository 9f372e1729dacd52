package engine

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"io"
	"log"
	"math/big"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// authority signs certificates, in PEM.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  string
}

func newAuthority(t *testing.T) authority {
	t.Helper()
	a := authority{}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test CA"}, NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	var cert string
	cert, a.key = issue(t, template, template, nil)
	a.pem = cert
	block, _ := pem.Decode([]byte(cert))
	var err error
	if a.cert, err = x509.ParseCertificate(block.Bytes); err != nil {
		t.Fatal(err)
	}
	return a
}

// issue makes a key and its certificate, signed by signer; nil = by itself.
func issue(t *testing.T, template, parent *x509.Certificate, signer *ecdsa.PrivateKey) (string, *ecdsa.PrivateKey) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	if signer == nil {
		signer = key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})), key
}

// leaf is a certificate for a name and its key.
func (a authority) leaf(t *testing.T, name string) (cert, key string) {
	t.Helper()
	cert, private := issue(t, &x509.Certificate{SerialNumber: big.NewInt(2), DNSNames: []string{name}, NotAfter: time.Now().Add(time.Hour),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}}, a.cert, a.key)
	der, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	return cert, string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}))
}

func TestTLS(t *testing.T) {
	ca, other := newAuthority(t), newAuthority(t)
	cert, key := ca.leaf(t, "prometheus.example")
	pair, err := tls.X509KeyPair([]byte(cert), []byte(key))
	if err != nil {
		t.Fatal(err)
	}
	clients := x509.NewCertPool()
	clients.AddCert(ca.cert)
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { respond(w, vectorOf(noon, "1")) }))
	server.TLS = &tls.Config{Certificates: []tls.Certificate{pair}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: clients}
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.StartTLS()
	defer server.Close()

	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	clientCert, clientKey := ca.leaf(t, "adapter")
	good := RemoteConfig{URLs: []string{server.URL}, ServerName: "prometheus.example",
		CAFile: write("ca", ca.pem), CertFile: write("cert", clientCert), KeyFile: write("key", clientKey)}
	ask := func(r *Remote, at time.Time) error {
		_, err := r.Func(time.Second)(t.Context(), "q", at)
		return err
	}
	for _, c := range []struct {
		what   string
		change func(*RemoteConfig)
		want   string // "" = it answers
	}{
		{"all is right", func(*RemoteConfig) {}, ""},
		{"another CA", func(c *RemoteConfig) { c.CAFile = write("other", other.pem) }, "no trusted connection (tls: failed to verify certificate: x509: certificate signed by unknown authority"},
		{"the system's CAs", func(c *RemoteConfig) { c.CAFile = "" }, "no trusted connection (tls: failed to verify certificate"},
		{"another name", func(c *RemoteConfig) { c.ServerName = "other.example" }, "certificate is valid for prometheus.example, not other.example"},
		{"the URL's name", func(c *RemoteConfig) { c.ServerName = "" }, "no trusted connection (tls: failed to verify certificate"},
		{"no certificate", func(c *RemoteConfig) { c.CertFile, c.KeyFile = "", "" }, "no trusted connection (remote error: tls: certificate required)"},
		{"http to https", func(c *RemoteConfig) {
			c.URLs, c.CertFile, c.KeyFile = []string{strings.Replace(server.URL, "https", "http", 1)}, "", ""
		}, "answers 400 Bad Request (Client sent an HTTP request to an HTTPS server.)"},
		{"https to http", func(c *RemoteConfig) {
			c.URLs = []string{strings.Replace(newStandIn(t, "1").URL, "http", "https", 1)}
		}, "no trusted connection (http: server gave HTTP response to HTTPS client)"},
	} {
		cfg := good
		c.change(&cfg)
		err := ask(remote(t, cfg), noon)
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v; want %q", c.what, err, c.want)
		}
	}

	if _, err := NewRemote(RemoteConfig{URLs: good.URLs, CAFile: filepath.Join(dir, "none")}); err == nil || !strings.Contains(err.Error(), "check the CA") {
		t.Errorf("a CA file that is not there: %v", err)
	}

	// Files that are renewed are read again.
	renewed := good
	renewed.CAFile = write("renewed", other.pem)
	r := remote(t, renewed)
	if err := ask(r, noon); err == nil {
		t.Error("another CA's server is trusted")
	}
	write("renewed", ca.pem)
	if err := ask(r, noon.Add(time.Second)); err != nil {
		t.Errorf("after the CA file was renewed: %v", err)
	}
}
