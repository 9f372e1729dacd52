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

	Handed []*x509.Certificate // the certificates that others have of these CAs; not kept in the Secret
}

// Purpose is what a certificate is for.
type Purpose struct {
	Names  []string // DNS names by which it is known; the first is its common name, too
	Usages []x509.ExtKeyUsage
}

// Policy says how long things live.
type Policy struct {
	CAValidity, CertValidity time.Duration
	KeepOlder                bool // drop no CA: what others have is not known
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
func (m Material) Next(serving Purpose, p Policy, now time.Time) (Action, string) {
	switch {
	case m.Signer == nil:
		return NewCA, "there is none"
	case !now.Before(m.Signer.Cert.NotAfter):
		return NewCA, "it has expired"
	case late(m.Signer.Cert, now):
		return NewCA, "it expires at " + m.Signer.Cert.NotAfter.Format(time.RFC3339)
	}
	var cert *x509.Certificate
	if m.Serving != nil {
		cert = m.Serving.Cert
	}
	if why := m.renew(cert, serving, p, now); why != "" {
		return NewCert, why
	}
	if len(m.prune(p, now)) < len(m.Older) {
		return Prune, "nothing that an older CA signed is in use"
	}
	return Keep, ""
}

// renew says why a new certificate is to be made in place of this one (nil = there is none); "" = it is good.
func (m Material) renew(cert *x509.Certificate, purpose Purpose, p Policy, now time.Time) string {
	switch {
	case cert == nil:
		return "there is none"
	case !now.Before(cert.NotAfter):
		return "it has expired"
	case !m.trusts(cert, now):
		return "none of the CAs signed it"
	case !slices.Equal(cert.DNSNames, purpose.Names):
		return fmt.Sprintf("it is for %q, not for %q", cert.DNSNames, purpose.Names)
	case !slices.Equal(cert.ExtKeyUsage, purpose.Usages):
		return "it is for another use"
	}
	signed := m.signed(cert)
	switch known := now.Sub(made(m.Signer.Cert)) >= p.Overlap; {
	case !signed && (known || cert.NotAfter.Sub(now) < p.Overlap):
		return "a new CA signs"
	case signed && late(cert, now):
		return "it expires at " + cert.NotAfter.Format(time.RFC3339)
	}
	return ""
}

// signed says whether the CA that signs from now on signed it.
func (m Material) signed(cert *x509.Certificate) bool {
	return cert.CheckSignatureFrom(m.Signer.Cert) == nil
}

// prune is what is to be kept of the older CAs: none once all who have a certificate can have known one of the new CA for long enough.
func (m Material) prune(p Policy, now time.Time) []*x509.Certificate {
	used := slices.ContainsFunc(append([]*x509.Certificate{m.Serving.Cert}, m.Handed...), func(c *x509.Certificate) bool {
		return !m.signed(c) || now.Sub(made(c)) < p.Overlap
	})
	return slices.DeleteFunc(slices.Clone(m.Older), func(ca *x509.Certificate) bool {
		return !now.Before(ca.NotAfter) || !used && !p.KeepOlder
	})
}

// Hand is what a Secret should hold, by which another program is known to us and knows us, if that is not data already: the certificate
// is made or renewed, or the bundle has changed. It says why; "" = data is as it should be.
func (m Material) Hand(data map[string][]byte, purpose Purpose, p Policy, now time.Time) (next map[string][]byte, why string, err error) {
	had, err := handed(data)
	if why = m.renew(had, purpose, p, now); err != nil {
		why = "it cannot be read: " + err.Error()
	}
	next = map[string][]byte{keyCert: data[keyCert], keyKey: data[keyKey], keyBundle: m.Bundle()}
	switch {
	case why != "":
		made, err := newCert(m.Signer, purpose, p.CertValidity, now)
		if err != nil {
			return nil, "", fmt.Errorf("make a certificate: %w", err)
		}
		next[keyCert] = certPEM(made.Cert)
		if next[keyKey], err = keyPEM(made.Key); err != nil {
			return nil, "", err
		}
	case !bytes.Equal(data[keyBundle], next[keyBundle]):
		why = "the trusted CAs have changed"
	}
	return next, why, nil
}

// handed reads the certificate of a Secret that was handed out; nil = there is none.
func handed(data map[string][]byte) (*x509.Certificate, error) {
	if len(data[keyCert]) == 0 {
		return nil, nil
	}
	certs, err := parseCerts(data[keyCert])
	if err != nil {
		return nil, fmt.Errorf("%s: %w", keyCert, err)
	}
	if len(certs) == 0 {
		return nil, fmt.Errorf("%s: no certificate", keyCert)
	}
	if _, err := pair(certs[0], data[keyKey]); err != nil {
		return nil, fmt.Errorf("%s: %w", keyKey, err)
	}
	return certs[0], nil
}

// Do makes the step. It changes nothing in m.
func (m Material) Do(a Action, serving Purpose, p Policy, now time.Time) (Material, error) {
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
		cert, err := newCert(m.Signer, serving, p.CertValidity, now)
		if err != nil {
			return m, fmt.Errorf("make a serving certificate: %w", err)
		}
		m.Serving = cert
	case Prune:
		m.Older = m.prune(p, now)
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

// Parse reads a Secret's data. Empty data is an empty Material. What cannot be read is an error: the caller may go on with what comes with
// it, which is the CA if only the serving certificate is spoiled, but somebody should be told.
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
		return m, fmt.Errorf("%s: %w", keyCert, err)
	}
	if len(certs) == 0 {
		return m, fmt.Errorf("%s: no certificate", keyCert)
	}
	if m.Serving, err = pair(certs[0], data[keyKey]); err != nil {
		return m, fmt.Errorf("%s: %w", keyKey, err)
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

func newCert(ca *Pair, purpose Purpose, validity time.Duration, now time.Time) (*Pair, error) {
	end := now.Add(validity)
	if ca.Cert.NotAfter.Before(end) {
		end = ca.Cert.NotAfter
	}
	return sign(&x509.Certificate{
		Subject:               pkix.Name{CommonName: purpose.Names[0]},
		DNSNames:              purpose.Names,
		NotBefore:             now.Add(-backdate(validity)),
		NotAfter:              end,
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           purpose.Usages,
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
