// Package plugin hands simulated GPUs to pods through the real kubelet, as NVIDIA's device plugin hands out real ones: by its
// Register call, with UUIDs as device ids, or UUID::N where a GPU is shared. (k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1)
package plugin

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// Config of a Plugin.
type Config struct {
	Dir      string   // the kubelet's folder of plugin sockets
	Resource string   // like nvidia.com/gpu
	Devices  []string // device ids
	HostDir  string   // the node's folder with library, state and busy files
	MountDir string   // where containers see it
	Logger   *slog.Logger
}

// Plugin serves the kubelet.
type Plugin struct {
	api.UnimplementedDevicePluginServer
	config Config
}

// New makes a Plugin; Run starts it.
func New(config Config) *Plugin { return &Plugin{config: config} }

const socketName = "fakegpu.sock"

// Run serves and stays registered until ctx ends: a kubelet that starts anew has removed the socket and forgotten the plugin.
func (p *Plugin) Run(ctx context.Context) error {
	for {
		if err := p.serve(ctx); err != nil && ctx.Err() == nil {
			p.config.Logger.Warn("not registered with the kubelet; trying again", "err", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(time.Second):
		}
	}
}

// serve registers once, and returns when the kubelet has removed the socket.
func (p *Plugin) serve(ctx context.Context) error {
	socket := filepath.Join(p.config.Dir, socketName)
	if err := os.Remove(socket); err != nil && !os.IsNotExist(err) {
		return err
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return fmt.Errorf("listen for the kubelet: %w", err)
	}
	server := grpc.NewServer()
	defer server.Stop()
	api.RegisterDevicePluginServer(server, p)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	if err := p.register(ctx); err != nil {
		return fmt.Errorf("register with the kubelet: %w", err)
	}
	p.config.Logger.Info("registered with the kubelet", "resource", p.config.Resource, "devices", len(p.config.Devices))
	ours, err := os.Stat(socket)
	if err != nil {
		return err
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-served:
			return err
		case <-time.After(time.Second):
			if now, err := os.Stat(socket); err != nil || !os.SameFile(ours, now) {
				return errors.New("the kubelet has started anew")
			}
		}
	}
}

func (p *Plugin) register(ctx context.Context) error {
	connection, err := grpc.NewClient("unix://"+filepath.Join(p.config.Dir, "kubelet.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	_, err = api.NewRegistrationClient(connection).Register(ctx, &api.RegisterRequest{Version: api.Version, Endpoint: socketName, ResourceName: p.config.Resource})
	return err
}

// GetDevicePluginOptions asks for nothing special.
func (p *Plugin) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return &api.DevicePluginOptions{}, nil
}

// ListAndWatch offers every device as healthy for as long as the kubelet listens.
func (p *Plugin) ListAndWatch(_ *api.Empty, stream api.DevicePlugin_ListAndWatchServer) error {
	response := &api.ListAndWatchResponse{}
	for _, id := range p.config.Devices {
		response.Devices = append(response.Devices, &api.Device{ID: id, Health: api.Healthy})
	}
	if err := stream.Send(response); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

// Allocate gives a container its GPUs: which they are, the simulated library, and where to write how busy they are.
func (p *Plugin) Allocate(_ context.Context, request *api.AllocateRequest) (*api.AllocateResponse, error) {
	response := &api.AllocateResponse{}
	for _, container := range request.ContainerRequests {
		var busy []string
		for _, id := range container.DevicesIds {
			busy = append(busy, filepath.Join(p.config.MountDir, "busy", id))
		}
		response.ContainerResponses = append(response.ContainerResponses, &api.ContainerAllocateResponse{
			Envs: map[string]string{
				"NVIDIA_VISIBLE_DEVICES":     strings.Join(container.DevicesIds, ","),
				"LD_LIBRARY_PATH":            filepath.Join(p.config.MountDir, "lib"),
				"FAKEGPU_STATE":              filepath.Join(p.config.MountDir, "state"),
				"CAPSTAN_SIMULATED_GPU_BUSY": strings.Join(busy, ":"),
			},
			Mounts: []*api.Mount{{ContainerPath: p.config.MountDir, HostPath: p.config.HostDir}},
		})
	}
	return response, nil
}

// PreStartContainer is not asked for.
func (p *Plugin) PreStartContainer(context.Context, *api.PreStartContainerRequest) (*api.PreStartContainerResponse, error) {
	return &api.PreStartContainerResponse{}, nil
}

// GetPreferredAllocation is not asked for.
func (p *Plugin) GetPreferredAllocation(context.Context, *api.PreferredAllocationRequest) (*api.PreferredAllocationResponse, error) {
	return &api.PreferredAllocationResponse{}, nil
}
