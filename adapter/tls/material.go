package tls

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"slices"
	"time"
)

// Keys of the Secret. The first three are those of a kubernetes.io/tls Secret with a CA.
const (
	keyCert   = "tls.crt" // the serving certificate
	keyKey    = "tls.key"
	keyBundle = "ca.crt" // all trusted CAs; the first signs
	keyCAKey  = "ca.key" // of the first
)

// Pair is a certificate and its key.
type Pair struct {
	Cert *x509.Certificate
	Key  crypto.Signer
}

// Material is what the Secret holds: immutable, and the zero value is an empty Secret.
type Material struct {
	Signer  *Pair               // the CA that signs from now on
	Older   []*x509.Certificate // CAs that signed before and are still trusted
	Serving *Pair
}

// Policy says how long things live.
type Policy struct {
	CAValidity, CertValidity time.Duration
	// Overlap is how long a change must have been known to all before the next step relies on it: a new CA is in the bundle
	// for so long before it signs what is served, and an old one stays for so long after.
	Overlap time.Duration
}

// Action is one step.
type Action int

const (
	Keep    Action = iota // nothing to do
	NewCA                 // make a CA; the one that signed until now stays trusted
	NewCert               // make a serving certificate
	Prune                 // drop older CAs that nobody needs any more
)

func (a Action) String() string { return [...]string{"keep", "new CA", "new certificate", "prune"}[a] }

// Next says what is to be done at now, for which reason. Repeat until it says Keep. A serving certificate and a CA are
// renewed when a third of their life remains. Everything follows from the certificates' own times, so that replicas
// agree without talking to each other.
func (m Material) Next(names []string, p Policy, now time.Time) (Action, string) {
	switch {
	case m.Signer == nil:
		return NewCA, "there is none"
	case !now.Before(m.Signer.Cert.NotAfter):
		return NewCA, "it has expired"
	case late(m.Signer.Cert, now):
		return NewCA, "it expires at " + m.Signer.Cert.NotAfter.Format(time.RFC3339)
	}
	s := m.Serving
	switch {
	case s == nil:
		return NewCert, "there is none"
	case !now.Before(s.Cert.NotAfter):
		return NewCert, "it has expired"
	case !m.trusts(s.Cert, now):
		return NewCert, "none of the CAs signed it"
	case !slices.Equal(s.Cert.DNSNames, names):
		return NewCert, fmt.Sprintf("it is for %q, not for %q", s.Cert.DNSNames, names)
	}
	signed := s.Cert.CheckSignatureFrom(m.Signer.Cert) == nil
	switch known := now.Sub(made(m.Signer.Cert)) >= p.Overlap; {
	case !signed && (known || s.Cert.NotAfter.Sub(now) < p.Overlap):
		return NewCert, "a new CA signs"
	case signed && late(s.Cert, now):
		return NewCert, "it expires at " + s.Cert.NotAfter.Format(time.RFC3339)
	}
	for _, c := range m.Older {
		if !now.Before(c.NotAfter) || signed && now.Sub(made(s.Cert)) >= p.Overlap {
			return Prune, "nothing that an older CA signed is served"
		}
	}
	return Keep, ""
}

// Do makes the step. It changes nothing in m.
func (m Material) Do(a Action, names []string, p Policy, now time.Time) (Material, error) {
	switch a {
	case NewCA:
		ca, err := newCA(p.CAValidity, now)
		if err != nil {
			return m, fmt.Errorf("make a CA: %w", err)
		}
		if m.Signer != nil && now.Before(m.Signer.Cert.NotAfter) {
			m.Older = append([]*x509.Certificate{m.Signer.Cert}, m.Older...)
		}
		m.Signer = ca
	case NewCert:
		cert, err := newCert(m.Signer, names, p.CertValidity, now)
		if err != nil {
			return m, fmt.Errorf("make a serving certificate: %w", err)
		}
		m.Serving = cert
	case Prune:
		signed := m.Serving.Cert.CheckSignatureFrom(m.Signer.Cert) == nil
		m.Older = slices.DeleteFunc(slices.Clone(m.Older), func(c *x509.Certificate) bool {
			return !now.Before(c.NotAfter) || signed && now.Sub(made(m.Serving.Cert)) >= p.Overlap
		})
	}
	return m, nil
}

// trusts says whether a client that knows the bundle accepts the certificate now.
func (m Material) trusts(cert *x509.Certificate, now time.Time) bool {
	return slices.ContainsFunc(append([]*x509.Certificate{m.Signer.Cert}, m.Older...), func(ca *x509.Certificate) bool {
		return now.Before(ca.NotAfter) && cert.CheckSignatureFrom(ca) == nil
	})
}

// Bundle is all trusted CAs, the one that signs first.
func (m Material) Bundle() []byte {
	var b []byte
	if m.Signer != nil {
		b = append(b, certPEM(m.Signer.Cert)...)
	}
	for _, c := range m.Older {
		b = append(b, certPEM(c)...)
	}
	return b
}

// Data is the Secret's data.
func (m Material) Data() (map[string][]byte, error) {
	caKey, err := keyPEM(m.Signer.Key)
	if err != nil {
		return nil, err
	}
	key, err := keyPEM(m.Serving.Key)
	if err != nil {
		return nil, err
	}
	return map[string][]byte{keyCert: certPEM(m.Serving.Cert), keyKey: key, keyBundle: m.Bundle(), keyCAKey: caKey}, nil
}

// Parse reads a Secret's data. Empty data is an empty Material. What cannot be read is an error: the caller may then
// start anew, but somebody should be told.
func Parse(data map[string][]byte) (Material, error) {
	var m Material
	if len(data[keyBundle]) == 0 && len(data[keyCert]) == 0 {
		return m, nil
	}
	bundle, err := parseCerts(data[keyBundle])
	if err != nil {
		return Material{}, fmt.Errorf("%s: %w", keyBundle, err)
	}
	if len(bundle) == 0 {
		return Material{}, fmt.Errorf("%s: no certificate", keyBundle)
	}
	if m.Signer, err = pair(bundle[0], data[keyCAKey]); err != nil {
		return Material{}, fmt.Errorf("%s: %w", keyCAKey, err)
	}
	m.Older = bundle[1:]
	if len(data[keyCert]) == 0 {
		return m, nil
	}
	certs, err := parseCerts(data[keyCert])
	if err != nil {
		return Material{}, fmt.Errorf("%s: %w", keyCert, err)
	}
	if len(certs) == 0 {
		return Material{}, fmt.Errorf("%s: no certificate", keyCert)
	}
	if m.Serving, err = pair(certs[0], data[keyKey]); err != nil {
		return Material{}, fmt.Errorf("%s: %w", keyKey, err)
	}
	return m, nil
}

// late says whether less than a third of the certificate's life remains.
func late(c *x509.Certificate, now time.Time) bool {
	return c.NotAfter.Sub(now) < c.NotAfter.Sub(c.NotBefore)/3
}

// backdate is how much earlier than its making a certificate begins, so that clocks may differ.
func backdate(validity time.Duration) time.Duration { return min(5*time.Minute, validity/20) }

// made is about when the certificate was made.
func made(c *x509.Certificate) time.Time {
	return c.NotBefore.Add(min(5*time.Minute, c.NotAfter.Sub(c.NotBefore)/21))
}

func newCA(validity time.Duration, now time.Time) (*Pair, error) {
	return sign(&x509.Certificate{
		Subject:               pkix.Name{CommonName: "capstan-adapter CA " + now.UTC().Format("2006-01-02T15:04:05Z")},
		NotBefore:             now.Add(-backdate(validity)),
		NotAfter:              now.Add(validity),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		IsCA:                  true,
		BasicConstraintsValid: true,
		MaxPathLenZero:        true,
	}, nil)
}

func newCert(ca *Pair, names []string, validity time.Duration, now time.Time) (*Pair, error) {
	end := now.Add(validity)
	if ca.Cert.NotAfter.Before(end) {
		end = ca.Cert.NotAfter
	}
	return sign(&x509.Certificate{
		Subject:               pkix.Name{CommonName: names[0]},
		DNSNames:              names,
		NotBefore:             now.Add(-backdate(validity)),
		NotAfter:              end,
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
	}, ca)
}

// sign makes a key and a certificate for it; without ca it signs itself.
func sign(template *x509.Certificate, ca *Pair) (*Pair, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	if template.SerialNumber, err = rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127)); err != nil {
		return nil, err
	}
	parent, signer := template, crypto.Signer(key)
	if ca != nil {
		parent, signer = ca.Cert, ca.Key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	return &Pair{cert, key}, nil
}

func certPEM(c *x509.Certificate) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw})
}

func keyPEM(key crypto.Signer) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), nil
}

func parseCerts(data []byte) ([]*x509.Certificate, error) {
	var out []*x509.Certificate
	for {
		var block *pem.Block
		if block, data = pem.Decode(data); block == nil {
			if len(bytes.TrimSpace(data)) > 0 {
				return nil, errors.New("not PEM")
			}
			return out, nil
		}
		if block.Type != "CERTIFICATE" {
			return nil, fmt.Errorf("a %s among certificates", block.Type)
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, err
		}
		out = append(out, c)
	}
}

func pair(cert *x509.Certificate, keyData []byte) (*Pair, error) {
	block, _ := pem.Decode(keyData)
	if block == nil {
		return nil, errors.New("not PEM")
	}
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, err
	}
	key, ok := parsed.(crypto.Signer)
	if !ok {
		return nil, fmt.Errorf("a %T cannot sign", parsed)
	}
	if public, ok := key.Public().(interface{ Equal(crypto.PublicKey) bool }); !ok || !public.Equal(cert.PublicKey) {
		return nil, errors.New("the key is not that of the certificate")
	}
	return &Pair{cert, key}, nil
}
