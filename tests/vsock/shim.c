/*
 * The kernel's vsock_test on the host of a device in user space: AF_VSOCK sockets become Unix
 * sockets by Firecracker's convention ($VSOCK_PATH), and on both sides the control connection,
 * TCP elsewhere, goes through the device, too. Linked in with --wrap; see images/vsock-test.
 *
 * GUEST: only the control connection is changed; its sockets are the kernel's.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <linux/vm_sockets.h>

/* The other side's CID; a server binds to any. */
#ifdef GUEST
#define PEER_CID VMADDR_CID_HOST
#else
#define PEER_CID 3
#endif

int __wrap_getaddrinfo(const char *host, const char *port, const struct addrinfo *hints,
		       struct addrinfo **result)
{
	static struct sockaddr_vm address;
	static struct addrinfo info;
	int any = strcmp(host, "0.0.0.0") == 0;

	address = (struct sockaddr_vm) {
		.svm_family = AF_VSOCK,
		.svm_cid = any ? VMADDR_CID_ANY : PEER_CID,
		.svm_port = atoi(port),
	};
	info = (struct addrinfo) {
		.ai_family = AF_VSOCK,
		.ai_socktype = hints->ai_socktype,
		.ai_addr = (struct sockaddr *)&address,
		.ai_addrlen = sizeof(address),
	};
	*result = &info;
	return 0;
}

void __wrap_freeaddrinfo(struct addrinfo *info)
{
	(void)info;
}

#ifdef GUEST

int __real_connect(int fd, const struct sockaddr *address, socklen_t length);

/* The host's control server may not be there yet: the guest has to boot, and it need not. */
int __wrap_connect(int fd, const struct sockaddr *address, socklen_t length)
{
	const struct sockaddr_vm *vm = (const struct sockaddr_vm *)address;
	int tries = vm->svm_port == CONTROL_PORT ? 600 : 1;
	int result;

	while ((result = __real_connect(fd, address, length)) < 0 && errno == ECONNRESET && --tries)
		usleep(100000);
	return result;
}

#else

#define FDS 1024

static struct {
	unsigned int port;
	int vsock, listens;
	unsigned long long sizes[3];
} sockets[FDS];

int __real_socket(int family, int type, int protocol);
int __real_bind(int fd, const struct sockaddr *address, socklen_t length);
int __real_listen(int fd, int backlog);
int __real_accept(int fd, struct sockaddr *address, socklen_t *length);
int __real_connect(int fd, const struct sockaddr *address, socklen_t length);
int __real_close(int fd);
int __real_poll(struct pollfd *fds, nfds_t count, int timeout);
int __real_setsockopt(int fd, int level, int name, const void *value, socklen_t length);
int __real_getsockopt(int fd, int level, int name, void *value, socklen_t *length);

static struct sockaddr_un path_of(int port)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	const char *path = getenv("VSOCK_PATH");

	if (!path) {
		fprintf(stderr, "VSOCK_PATH is not set\n");
		exit(EXIT_FAILURE);
	}
	if (port < 0)
		snprintf(address.sun_path, sizeof(address.sun_path), "%s", path);
	else
		snprintf(address.sun_path, sizeof(address.sun_path), "%s_%d", path, port);
	return address;
}

int __wrap_socket(int family, int type, int protocol)
{
	int fd;

	if (family != AF_VSOCK)
		return __real_socket(family, type, protocol);
	fd = __real_socket(AF_UNIX, type, 0);
	if (fd >= FDS)
		abort();
	if (fd >= 0) {
		memset(&sockets[fd], 0, sizeof(sockets[fd]));
		sockets[fd].vsock = 1;
	}
	return fd;
}

int __wrap_bind(int fd, const struct sockaddr *address, socklen_t length)
{
	if (address->sa_family != AF_VSOCK)
		return __real_bind(fd, address, length);
	sockets[fd].port = ((const struct sockaddr_vm *)address)->svm_port;
	return 0;
}

int __wrap_listen(int fd, int backlog)
{
	struct sockaddr_un address = path_of(sockets[fd].port);

	unlink(address.sun_path);
	if (__real_bind(fd, (struct sockaddr *)&address, sizeof(address)) < 0)
		return -1;
	sockets[fd].listens = 1;
	return __real_listen(fd, backlog);
}

int __wrap_accept(int fd, struct sockaddr *address, socklen_t *length)
{
	struct sockaddr_vm peer = { .svm_family = AF_VSOCK, .svm_cid = PEER_CID };
	int connection = __real_accept(fd, NULL, NULL);

	if (connection >= FDS)
		abort();
	if (connection >= 0) {
		memset(&sockets[connection], 0, sizeof(sockets[connection]));
		sockets[connection].vsock = 1;
		if (address) {
			memcpy(address, &peer, sizeof(peer));
			*length = sizeof(peer);
		}
	}
	return connection;
}

int __wrap_close(int fd)
{
	struct sockaddr_un address;

	if (fd >= 0 && fd < FDS && sockets[fd].listens) {
		address = path_of(sockets[fd].port);
		unlink(address.sun_path);
	}
	if (fd >= 0 && fd < FDS)
		memset(&sockets[fd], 0, sizeof(sockets[fd]));
	return __real_close(fd);
}

/* Asks the device for a connection; whether the guest has accepted. */
static int ask(int fd, unsigned int port)
{
	struct sockaddr_un address = path_of(-1);
	char line[64];
	size_t length = 0;

	if (__real_connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0)
		return 0;
	snprintf(line, sizeof(line), "CONNECT %u\n", port);
	if (send(fd, line, strlen(line), MSG_NOSIGNAL) < 0)
		return 0;
	while (length < sizeof(line) && read(fd, line + length, 1) == 1) {
		if (line[length++] == '\n')
			return strncmp(line, "OK ", 3) == 0;
	}
	return 0;
}

int __wrap_connect(int fd, const struct sockaddr *address, socklen_t length)
{
	const struct sockaddr_vm *vm = (const struct sockaddr_vm *)address;
	int tries = vm->svm_port == CONTROL_PORT ? 3000 : 1;

	if (address->sa_family != AF_VSOCK)
		return __real_connect(fd, address, length);
	while (!ask(fd, vm->svm_port)) {
		int again;

		if (!--tries) {
			errno = ECONNRESET;
			return -1;
		}
		usleep(100000);
		/* A Unix socket connects once. */
		again = __real_socket(AF_UNIX, SOCK_STREAM, 0);
		dup2(again, fd);
		__real_close(again);
	}
	return 0;
}

/* Sizes of buffers are the device's affair; what is asked for is remembered. */
int __wrap_setsockopt(int fd, int level, int name, const void *value, socklen_t length)
{
	if (level != AF_VSOCK)
		return __real_setsockopt(fd, level, name, value, length);
	if (name > 2 || length != sizeof(unsigned long long)) {
		errno = ENOPROTOOPT;
		return -1;
	}
	memcpy(&sockets[fd].sizes[name], value, length);
	return 0;
}

int __wrap_getsockopt(int fd, int level, int name, void *value, socklen_t *length)
{
	if (level != AF_VSOCK)
		return __real_getsockopt(fd, level, name, value, length);
	if (name > 2 || *length != sizeof(unsigned long long)) {
		errno = ENOPROTOOPT;
		return -1;
	}
	memcpy(value, &sockets[fd].sizes[name], *length);
	return 0;
}

/* poll(2) of a Unix socket does not wait for SO_RCVLOWAT bytes. */
int __wrap_poll(struct pollfd *fds, nfds_t count, int timeout)
{
	int lowat = 1, there = 0, passed = 0;
	socklen_t length = sizeof(lowat);

	__real_getsockopt(fds[0].fd, SOL_SOCKET, SO_RCVLOWAT, &lowat, &length);
	if (lowat <= 1 || count != 1)
		return __real_poll(fds, count, timeout);
	while (ioctl(fds[0].fd, FIONREAD, &there) == 0 && there < lowat) {
		if (timeout >= 0 && passed >= timeout) {
			fds[0].revents = 0;
			return 0;
		}
		usleep(1000);
		passed++;
	}
	return __real_poll(fds, count, timeout);
}

#endif
