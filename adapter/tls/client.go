package tls

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net/http"
	"sync"
)

// client sends requests on connections on which both sides show a certificate of the CA.
type client struct {
	manager   *Manager
	name      string
	transport func(*tls.Config) *http.Transport

	mu   sync.Mutex // protects the following fields
	of   *credentials
	http *http.Transport
}

// Client makes a RoundTripper that shows the adapter's certificate, and accepts only a server that shows one of the CA's for name,
// whatever its address. transport makes what carries it out, anew after each rotation. Requests to http:// URLs go out as they are.
func (m *Manager) Client(name string, transport func(*tls.Config) *http.Transport) http.RoundTripper {
	return &client{manager: m, name: name, transport: transport}
}

// RoundTrip implements [http.RoundTripper].
func (c *client) RoundTrip(r *http.Request) (*http.Response, error) {
	carrier, err := c.carrier()
	if err != nil {
		return nil, err
	}
	return carrier.RoundTrip(r)
}

// carrier is the transport with the newest credentials.
func (c *client) carrier() (*http.Transport, error) {
	newest := c.manager.current.Load()
	if newest == nil {
		return nil, errors.New("the adapter has no certificate yet")
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.of == newest {
		return c.http, nil
	}
	pair, err := tls.X509KeyPair(newest.cert, newest.key)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(newest.bundle)
	if c.http != nil {
		c.http.CloseIdleConnections()
	}
	c.of, c.http = newest, c.transport(&tls.Config{
		Certificates: []tls.Certificate{pair}, RootCAs: roots, ServerName: c.name, MinVersion: tls.VersionTLS13,
	})
	return c.http, nil
}
