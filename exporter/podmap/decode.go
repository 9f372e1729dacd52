package podmap

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/capstan-gpu/capstan/metricname"
)

// errPod marks bytes that are no v1.Pod.
var errPod = errors.New("not a pod")

// maxText bounds what is kept of one string, so that a pod with a huge annotation costs nothing here.
const maxText = 512

// decodePod reads a v1.Pod in protobuf, as the Pods API sends it, and keeps what [Pod] holds; of its labels those that are named. By
// hand, since these few fields are all that is wanted: k8s.io/api would add more to the exporter's memory than all its own data, and decodes the
// other 99 % of a pod at every change. Field numbers are those of k8s.io/api/core/v1/generated.proto, which never change;
// a test and a fuzz target hold this against the real type.
func decodePod(b []byte, labels []string) (Pod, error) {
	var p Pod
	err := fields(b, func(field protowire.Number, value []byte, _ uint64) error {
		switch field {
		case 1:
			return decodeMeta(value, &p, labels)
		case 2:
			return fields(value, func(field protowire.Number, _ []byte, number uint64) error {
				if field == 11 {
					p.HostNetwork = number != 0
				}
				return nil
			})
		case 3:
			return decodeStatus(value, &p)
		}
		return nil
	})
	if err != nil {
		return Pod{}, err
	}
	if p.UID == "" || p.Name == "" {
		return Pod{}, fmt.Errorf("%w: no name or no UID", errPod)
	}
	return p, nil
}

func decodeMeta(b []byte, p *Pod, labels []string) error {
	return fields(b, func(field protowire.Number, value []byte, _ uint64) error {
		switch field {
		case 1:
			return text(&p.Name, value)
		case 3:
			return text(&p.Namespace, value)
		case 5:
			return text(&p.UID, value)
		case 9:
			p.Terminating = true
		case 11:
			k, v, err := entry(value)
			if i := slices.Index(labels, k); i >= 0 {
				if p.Labels == nil {
					p.Labels = make([]string, len(labels))
				}
				p.Labels[i] = v
			}
			return err
		case 12:
			k, v, err := entry(value)
			switch k {
			case metricname.AnnotationStatsPort:
				p.StatsPort = v
			case metricname.AnnotationStatsPath:
				p.StatsPath = v
			case AnnotationHAMi: // what is cut off of a long one is incomplete, and left out
				p.Given = givenBy(v)
			}
			return err
		}
		return nil
	})
}

// entry reads one entry of a map from text to text.
func entry(b []byte) (k, v string, err error) {
	err = fields(b, func(field protowire.Number, value []byte, _ uint64) error {
		switch field {
		case 1:
			return text(&k, value)
		case 2:
			return text(&v, value)
		}
		return nil
	})
	return k, v, err
}

func decodeStatus(b []byte, p *Pod) error {
	return fields(b, func(field protowire.Number, value []byte, _ uint64) error {
		switch field {
		case 1:
			return text(&p.Phase, value)
		case 6:
			return text(&p.IP, value)
		}
		return nil
	})
}

// text keeps a string, or the start of a long one. A copy: the message's bytes are not to be kept alive.
func text(to *string, b []byte) error {
	if !utf8.Valid(b) {
		return fmt.Errorf("%w: text that is not UTF-8", errPod)
	}
	if len(b) > maxText {
		b = b[:maxText]
	}
	*to = strings.ToValidUTF8(string(b), "")
	return nil
}

// fields calls each with every field of a message: its bytes, or its number.
func fields(b []byte, each func(field protowire.Number, value []byte, number uint64) error) error {
	for len(b) > 0 {
		field, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return fmt.Errorf("%w: %w", errPod, protowire.ParseError(n))
		}
		b = b[n:]
		var value []byte
		var number uint64
		switch kind {
		case protowire.BytesType:
			value, n = protowire.ConsumeBytes(b)
		case protowire.VarintType:
			number, n = protowire.ConsumeVarint(b)
		default:
			n = protowire.ConsumeFieldValue(field, kind, b)
		}
		if n < 0 {
			return fmt.Errorf("%w: field %d: %w", errPod, field, protowire.ParseError(n))
		}
		b = b[n:]
		if err := each(field, value, number); err != nil {
			return err
		}
	}
	return nil
}
